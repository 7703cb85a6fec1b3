"""Makes sentences of the API readable on pages: labels of keys in place of their ids, times in place of ISO 8601.

Sentences are for programs, too, so the API has ids and ISO times in them.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime

_KEY = re.compile(r"\bkey-[0-9a-z-]+\b|\b[0-9a-f]{12}\b")
_TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)")
Labels = Callable[[set[str]], dict[str, str]]


def readable(sentence: str, labels: Labels) -> str:
    """Returns a sentence with the labels of keys and with times in UTC. `labels` returns the labels of ids."""
    sentence = _TIME.sub(_time, sentence)
    known = labels(found) if (found := set(_KEY.findall(sentence))) else {}
    return _KEY.sub(lambda one: known.get(one[0], one[0]), sentence)


def _time(found: re.Match[str]) -> str:
    return f"{datetime.fromisoformat(found[0]).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
