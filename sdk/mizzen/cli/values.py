"""Reads the values of options: durations, integers, formats of output. Also the errors of commands."""

import argparse
import re
from collections.abc import Callable
from math import isfinite

from mizzen.cli.exits import Exit

FORMATS = ("table", "wide", "json", "yaml", "name")

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_LONGEST = 50


class BadValue(argparse.ArgumentTypeError):
    """The value of an option is invalid. The message names the value and what is valid."""


class UsageError(Exception):
    """The arguments of a command cannot be combined, or do not fit the object that they name."""


class Failure(Exception):
    """A command failed. `code` is its exit code, and the message says why."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


def seconds(text: str, above_zero: bool) -> float:
    """Parse a duration such as `90s`, `1h30m` or `2d`, or a number of seconds. Return it in seconds.

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


def finite(right: str, *, above_zero: bool) -> Callable[[str], float]:
    """Return a parser of finite numbers above 0, or 0 too. `right` describes valid values in error messages."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not (isfinite(number) and (number > 0 if above_zero else number >= 0)):
            raise BadValue(f"{text!r} must be {right}")
        return number

    return read
