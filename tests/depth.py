"""How deep the random tests go."""

import os

_SHARE = float(os.environ.get("MIZZEN_EXAMPLES", "0.5"))


def examples(number: int) -> int:
    """How many of a test's random examples are tried: half of `number`, or all of them in `make properties`.

    MIZZEN_EXAMPLES is the share that is tried; it may be more than 1.
    """
    return max(1, round(number * _SHARE))
