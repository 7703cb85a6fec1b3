"""The number of examples that random tests run."""

import os

_SHARE = float(os.environ.get("MIZZEN_EXAMPLES", "0.15"))


def examples(number: int) -> int:
    """Returns how many of a test's `number` random examples run: by default about a seventh, in `make properties`
    and `make test-all` all.

    MIZZEN_EXAMPLES is the share that runs; it may be more than 1.
    """
    return max(1, round(number * _SHARE))
