"""Reads option values that are durations."""

from collections.abc import Callable

import click

from mizzen.cli.plain.values import BadValue, seconds


def duration(above_zero: bool) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Return an option callback that converts a duration such as `90s`, `1h30m`, `2d` or `90` to seconds."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            return seconds(text, above_zero)
        except BadValue as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return read
