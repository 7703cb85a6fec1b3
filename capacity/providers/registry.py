"""The registry of provider kinds, and the providers that an installation's settings configure."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from capacity.provider import Provider
from domain.ids import NAME_RULE, is_name
from infra.config.settings import Settings
from infra.documents import problems
from infra.errors import ConfigurationError

KINDS: Mapping[str, str] = {
    "ec2": "capacity.providers.ec2",
    "kubernetes": "capacity.providers.kubernetes",
    "slurm": "capacity.providers.slurm",
    "static": "capacity.providers.static",
    "trace": "capacity.providers.trace",
}
"""Each kind's package, which is imported when the kind is used. A package defines `SettingsOf`, the model of a
provider's settings, and `open_provider(name, settings, installation)`."""
STATIC = "static"
"""The name of the provider of static machines, whose agents were started by hand. Every installation has it."""


def open_providers(settings: Settings) -> dict[str, Provider]:
    """Returns the providers of an installation by name.

    Raises:
        ConfigurationError: the settings of a provider are not valid; the message lists every problem.
    """
    given = {STATIC: {"kind": STATIC}, **settings.providers}
    return {name: _open(name, dict(body), settings) for name, body in given.items()}


def check_providers(settings: Settings) -> None:
    """Validates the settings of all providers.

    Raises:
        ConfigurationError: as in `open_providers`.
    """
    for name, body in settings.providers.items():
        _check(name, dict(body))


def providers_of(settings: Settings, kind: str) -> dict[str, Any]:
    """Returns the validated settings of the providers of one kind, by name.

    Raises:
        ConfigurationError: as in `open_providers`.
    """
    own = {name: body for name, body in settings.providers.items() if body.get("kind") == kind}
    return {name: _check(name, dict(body))[1] for name, body in own.items()}


def _open(name: str, body: dict[str, Any], settings: Settings) -> Provider:
    package, checked = _check(name, body)
    make: Callable[[str, Any, Settings], Provider] = package.open_provider
    return make(name, checked, settings)


def _check(name: str, body: dict[str, Any]) -> tuple[Any, Any]:
    where = f"configuration:\n  providers.{name}"
    if not is_name(name):
        raise ConfigurationError(f"{where}: must be {NAME_RULE}")
    kind = body.pop("kind", None)
    if kind not in KINDS or (kind == STATIC) != (name == STATIC):
        known = ", ".join(sorted(KINDS.keys() - {STATIC}))
        raise ConfigurationError(f"{where}.kind: must be one of {known}; it is {kind!r}")
    package = import_module(KINDS[kind])
    try:
        return package, package.SettingsOf.model_validate(body)
    except ValidationError as error:
        raise ConfigurationError(f"{where}:\n{problems(package.SettingsOf, error)}") from None
