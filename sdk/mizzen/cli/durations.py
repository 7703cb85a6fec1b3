"""Durations as options of the command take them."""

import re
from collections.abc import Callable

import click

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]*)?")
_LONGEST = 50


def duration(above_zero: bool) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Option callback: seconds of a text such as `90s`, `1h30m` or `2d`, or of a number of seconds."""
    least = "more than 0" if above_zero else "0 or more"

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        if len(text) <= _LONGEST and (_PLAIN.fullmatch(text) or _DURATION.fullmatch(text)):
            parts = _PART.findall(text) or [(text, "s")]
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
            if seconds > 0 or not above_zero:
                return seconds
        right = f"a duration such as 30s, 10m, 2h or 1h30m, or a number of seconds, {least}"
        raise click.BadParameter(f"{text!r} must be {right}", context, parameter)

    return read
