"""What a store has under many keys at once, by few requests: one listing in place of a request for each key."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mizzen.objects.store import ObjectInfo, ObjectStore

_FEW = 4
_OTHERS = 2
"""Listed objects that nobody asked for, for each one that somebody did, before a listing is given up."""
_SPARE = 1000


def listed(store: "ObjectStore", keys: Sequence[str]) -> "dict[str, ObjectInfo | None]":
    """Objects by key, None where there is none. Keys that a listing would take too long to reach are left out."""
    wanted = sorted(set(keys))
    if len(wanted) <= _FEW:
        return {}
    # The first key itself is left out: listings begin behind a key.
    first, last = wanted[0], wanted[-1]
    common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    budget = _SPARE + _OTHERS * len(wanted)
    found: dict[str, ObjectInfo | None] = {}
    reached = last
    for info in store.list(first[:common], after=first):
        if info.key > last:
            break
        budget -= 1
        if budget < 0:
            reached = info.key
            break
        found[info.key] = info
    return {key: found.get(key) for key in wanted[1:] if key <= reached}
