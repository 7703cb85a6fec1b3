"""How many of the random examples and of the cases of a test run in `make test`."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

_SHARE = float(os.environ.get("MIZZEN_EXAMPLES", "0.15"))


def examples(number: int) -> int:
    """Returns how many of a test's `number` random examples run: by default about a seventh, in `make properties`
    and `make test-all` all.

    MIZZEN_EXAMPLES is the share that runs; it may be more than 1.
    """
    return max(1, round(number * _SHARE))


def few(values: Iterable[Any], number: int) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize`, all after the first `number` marked as long.

    A case that is a tuple has the values of several parameters.
    """
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=() if index < number else pytest.mark.long) for index, case in enumerate(cases)]
