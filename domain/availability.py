"""Traces of availability: how many machines a zone can have in each interval."""

import json


def parse_counts(text: str | bytes) -> tuple[float, tuple[int, ...]]:
    """Parses `{"metadata": {"gap_seconds": S}, "data": [N, ...]}`, the form of the traces of spot capacity.

    Returns the length of an interval in seconds, and the number of machines in each interval.

    Raises:
        ValueError: the text is not valid; the message says what is wrong.
    """
    try:
        body = json.loads(text)
        gap_s, counts = float(body["metadata"]["gap_seconds"]), tuple(int(count) for count in body["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"is not a valid trace file: {error!r}") from None
    if not 0 < gap_s < float("inf") or not counts or min(counts) < 0:
        raise ValueError("gap_seconds must be > 0 and finite, and data a non-empty list of numbers >= 0")
    return gap_s, counts
