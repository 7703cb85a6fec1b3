"""Declares the options of a command once: each field of a frozen dataclass carries its click parameter.

    @dataclass(frozen=True)
    class ScoreOptions:
        instance: Path = argument(type=PATH)
        seed: int = option(default=0, help="The first seed.")

    @click.command()
    @takes(ScoreOptions)
    def score(given: ScoreOptions) -> None: ...

A field can be another such dataclass: `run: RunOptions = included(RunOptions)` adds its options to the command.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import wraps
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

import click

from domain.units import parse_duration_s
from infra.errors import ConfigurationError

T = TypeVar("T")
_DECLARED, _INCLUDED = "declared", "included"
FILE = click.Path(path_type=Path, dir_okay=False)
PATH = click.Path(path_type=Path)


def option(flag: str | None = None, **settings: Any) -> Any:
    """Returns the field of an option. The flag follows from the field's name unless given; `settings` are click's."""

    def declared(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return click.option(flag or f"--{name.replace('_', '-')}", name, **settings)

    return field(metadata={_DECLARED: declared})


def argument(**settings: Any) -> Any:
    """Returns the field of a positional argument."""
    return field(metadata={_DECLARED: lambda name: click.argument(name, **settings)})


def included(kind: type[T]) -> T:
    """Returns a field that adds the options of the dataclass `kind` to the command."""
    found: T = field(metadata={_INCLUDED: kind})
    return found


def takes(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Returns a decorator for the function of a command, which adds the options of `kind` and passes their values."""

    def decorate(command: Callable[[T], None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            command(_value(kind, values))

        for declared in reversed(list(_declared(kind))):
            declared(run)
        return run

    return decorate


def _declared(kind: type) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    for one in fields(kind):
        if inner := one.metadata.get(_INCLUDED):
            yield from _declared(inner)
        else:
            yield one.metadata[_DECLARED](one.name)


def _value(kind: type[T], values: dict[str, Any]) -> T:
    return kind(
        **{
            one.name: _value(inner, values) if (inner := one.metadata.get(_INCLUDED)) else values[one.name]
            for one in fields(kind)  # type: ignore[arg-type]
        }
    )


def finite(*, above_zero: bool) -> Callable[[click.Context, click.Parameter, float | None], float | None]:
    """Returns an option callback that accepts finite numbers above 0, or 0 too."""

    def checked(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
        if value is not None and not (isfinite(value) and (value > 0 if above_zero else value >= 0)):
            right = "a finite number above 0" if above_zero else "a finite number, 0 or more"
            raise click.BadParameter(f"{value}: must be {right}", context, parameter)
        return value

    return checked


def time_s(flag: str, text: str | None, absent: float) -> float:
    """Returns the seconds of a duration such as 40d or of a number of seconds; `absent` if `text` is None.

    Raises:
        ConfigurationError: the text is malformed.
    """
    if text is None:
        return absent
    try:
        return float(text) if text.replace(".", "", 1).isdigit() else parse_duration_s(text)
    except ValueError:
        right = "a number of seconds, or a duration such as 40d or 12h30m"
        raise ConfigurationError(f"{flag} {text}: must be {right}") from None


@dataclass(frozen=True)
class RunOptions:
    """The options of commands that run the simulator."""

    names: tuple[str, ...] = option(
        "--policy", multiple=True, default=("global",), show_default=True, help="Repeatable."
    )
    json: Path | None = option(type=PATH, help="File for the results as JSON; -: standard output.")
    report: Path | None = option(type=FILE, help="File for the HTML report with charts.")
    seed: int = option(type=int, default=0, show_default=True)
    until: str | None = option(metavar="TIME", help="End the simulation at this time (default: when all jobs ended).")
    measure: str | None = option(metavar="FROM..TO", help="Measure only this span; hourly lists cover everything.")
    params: tuple[str, ...] = option(
        "--param", multiple=True, metavar="NAME=VALUE", help="An assumption: eviction_s=30."
    )

    @property
    def until_s(self) -> float:
        """The time of `--until` in seconds."""
        return time_s("--until", self.until, inf)


@dataclass(frozen=True)
class OutputOptions:
    """The files of commands that replay or simulate research systems."""

    json: Path | None = option(type=PATH, help="File for all results; -: standard output.")
    report: Path | None = option(type=PATH, help="File for an HTML report; -: standard output.")
