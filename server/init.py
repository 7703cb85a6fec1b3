"""`mizzen init`: prepares an installation on an existing Postgres, before its processes start."""

from collections.abc import Sequence

import click

from domain.ids import NAME_RULE, is_name
from infra.bootstrap import OPERATOR_KEY_FILE, bootstrap
from infra.config.settings import Settings
from infra.db.session import open_engine
from infra.errors import ConfigurationError
from mizzen.objects.urls import open_store


def run_init(settings: Settings, regions: Sequence[str], *, forget_unreadable_secrets: bool = False) -> int:
    """Migrates the schema, adds regions (`NAME=BUCKET`), and creates missing keys.

    `forget_unreadable_secrets`: secrets that the master key cannot decrypt are deleted; by default they are an error.

    Raises:
        ConfigurationError: no database is set, or a region does not have the form `NAME=BUCKET`.
    """
    if settings.database is None:
        raise ConfigurationError("--database: not set; give the URL of a Postgres database")
    buckets = dict(_region(text) for text in regions)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    engine = open_engine(settings.database, pool_size=1)
    try:
        bootstrap(
            engine,
            settings.data_dir.resolve(),
            settings.master_key_path,
            buckets,
            forget_unreadable_secrets=forget_unreadable_secrets,
        )
    finally:
        engine.dispose()
    click.echo(f"operator's key  {settings.data_dir / OPERATOR_KEY_FILE}", err=True)
    click.echo(f"master key      {settings.master_key_path}  (workers and the API need it, as `master_key`)", err=True)
    return 0


def _region(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not equals or not is_name(name):
        raise ConfigurationError(f"--region: {text!r} must be NAME=BUCKET, where NAME is {NAME_RULE}")
    try:
        open_store(url)
    except ValueError as error:
        raise ConfigurationError(f"--region {name}: {error}") from None
    return name, url
