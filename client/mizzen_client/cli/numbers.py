"""Numbers as values of options."""

from math import isfinite
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number in a range. `click.FloatRange` accepts `nan`, and `inf` in a range without an upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        found = float(super().convert(value, param, ctx))
        if not isfinite(found):
            self.fail(f"{value} must be a finite number", param, ctx)
        return found
