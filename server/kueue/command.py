"""`mizzen kueue-dispatcher`."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.api import KubernetesApi
from infra.documents import read_document
from infra.errors import ConfigurationError, StackError
from infra.files import stamp
from mizzen_client.cli.session import Session
from mizzen_client.errors import ClientError
from server.commands import log_to_stderr, run_command
from server.kueue.dispatcher import KueueDispatcher, Tables
from server.kueue.settings import DispatcherSettings
from server.options import FILE

_CATALOGUE_S = 30.0
_log = logging.getLogger(__name__)


@click.command("kueue-dispatcher")
@click.option("--config", type=FILE, required=True, help="YAML file with the worker clusters.")
@click.option("--catalogue", is_flag=True, help="Read from mizzen's API in which regions tables are.")
@click.option("--once", is_flag=True, help="Nominate once for the Workloads that wait now, then exit.")
@click.pass_obj
def kueue_dispatcher(session: Session, config: Path, catalogue: bool, once: bool) -> None:
    """Nominate worker clusters for Workloads of Kueue (MultiKueue), by the auction."""
    log_to_stderr()
    run_command(lambda: _run(config, _catalogue(session) if catalogue else dict, once))


def _run(config: Path, catalogue: Callable[[], Tables], once: bool) -> None:
    settings = _Settings(config)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def tables() -> Tables:
        own = {name: frozenset(regions) for name, regions in settings().tables.items()}
        found = catalogue()
        return {name: own.get(name, frozenset()) | found.get(name, frozenset()) for name in own.keys() | found.keys()}

    api = KubernetesApi("kueue", settings())
    try:
        KueueDispatcher(api, settings, tables).run(stop, once=once)
    except ProviderUnavailable as error:
        raise StackError(str(error)) from None
    finally:
        api.close()


class _Settings:
    """The settings of a file, read again when it changes. A wrong change is logged, and has no effect."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, stamp(path)
        self._read = read_document(DispatcherSettings, path, "configuration file")

    def __call__(self) -> DispatcherSettings:
        now = stamp(self._path)
        if now is not None and now != self._stamp:
            self._stamp = now
            try:
                self._read = read_document(DispatcherSettings, self._path, "configuration file")
            except ConfigurationError as error:
                _log.warning("%s", error)
        return self._read


def _catalogue(session: Session) -> Callable[[], Tables]:
    """Returns a function that returns the regions with a complete replica of each table, as of the last 30 s."""
    read_s, found = -_CATALOGUE_S, dict[str, frozenset[str]]()

    def tables() -> Tables:
        nonlocal read_s, found
        if time.monotonic() >= read_s + _CATALOGUE_S:
            read_s = time.monotonic()
            try:
                found = {
                    table["name"]: frozenset(
                        one["region"]
                        for one in table["replicas"]
                        if one["state"] == "ready" and one["whole"] and one["stale_since"] is None
                    )
                    for table in session.client.tables()
                }
            except ClientError as error:
                _log.warning("tables of mizzen's API: %s", error)
        return found

    return tables
