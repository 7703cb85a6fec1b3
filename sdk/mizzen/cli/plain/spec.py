"""Classes that describe a command and its options, and functions that parse option values."""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from mizzen.cli.exits import Exit

FORMATS = ("table", "wide", "json", "yaml", "name")

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_LONGEST = 50


class BadValue(ValueError):
    """The value of an option is invalid. The message names the value and what is valid."""


class UsageError(Exception):
    """The arguments of a command are missing, unknown, invalid or cannot be combined."""


class Failure(Exception):
    """A command failed. `code` is its exit code, and the message says why."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Option:
    """An option of a command. `read` parses the text of its value."""

    flags: tuple[str, ...]
    name: str
    """The attribute of the parsed arguments that holds the value."""
    help: str
    read: Callable[[str], Any] = str
    metavar: str | None = None
    default: Any = None
    choices: tuple[str, ...] = ()
    required: bool = False
    is_flag: bool = False
    """Whether the option takes no value."""


@dataclass(frozen=True)
class Argument:
    """A required positional argument of a command."""

    name: str
    metavar: str
    help: str


@dataclass(frozen=True)
class Command:
    """A command. The first paragraph of `help` is its line in lists of commands."""

    name: str
    help: str
    run: Callable[[Namespace], int]
    """The function of the command. It receives the parsed values and returns the exit code."""
    options: tuple[Option, ...] = ()
    arguments: tuple[Argument, ...] = ()


@dataclass(frozen=True)
class Group:
    """A group of commands."""

    name: str
    help: str
    commands: Mapping[str, Command]


def seconds(text: str, above_zero: bool) -> float:
    """Parse a duration such as `90s`, `1h30m` or `2d`, or a number of seconds. Return its seconds.

    Raises:
        BadValue: the text is not a duration, or the duration is 0 and `above_zero` is set.
    """
    if len(text) <= _LONGEST and (_PLAIN.fullmatch(text) or _DURATION.fullmatch(text)):
        parts = _PART.findall(text) or [(text, "s")]
        found = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        if found > 0 or not above_zero:
            return found
    least = "more than 0" if above_zero else "0 or more"
    right = f"a duration such as 30s, 10m, 2h or 1h30m, or a number of seconds, {least}"
    raise BadValue(f"{text!r} must be {right}")


def duration(above_zero: bool) -> Callable[[str], float]:
    """Return a parser of durations."""
    return lambda text: seconds(text, above_zero)


def whole(least: int) -> Callable[[str], int]:
    """Return a parser of integers that are at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text) if len(text) <= _LONGEST else None
        except ValueError:
            number = None
        if number is None:
            raise BadValue(f"{text!r} is not a valid integer in the range x>={least}")
        if number < least:
            raise BadValue(f"{text} is not in the range x>={least}")
        return number

    return read


def choice(names: tuple[str, ...]) -> Callable[[str], str]:
    """Return a parser that accepts only these names."""

    def read(text: str) -> str:
        if text not in names:
            raise BadValue(f"{text!r} is not one of {', '.join(repr(name) for name in names)}")
        return text

    return read


def _patience(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not (number >= 0 and isfinite(number)):
        raise BadValue(f"{text!r} must be a number of seconds, 0 or more")
    return number


SHARED = (
    Option(
        ("-o", "--output"),
        "output",
        "The output format: table, wide, json, yaml or name.",
        choice(FORMATS),
        "FORMAT",
        "table",
        FORMATS,
    ),
    Option(("--context",), "context", "Accepted for consistency with other commands; ignored.", metavar="NAME"),
    Option(
        ("--patience",),
        "patience_s",
        "Accepted for consistency with other commands; ignored.",
        _patience,
        "SECONDS",
        30.0,
    ),
)
"""The options that every command has."""
