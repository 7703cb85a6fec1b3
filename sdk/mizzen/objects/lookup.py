"""Looks up many keys of a store with one listing instead of one request per key."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mizzen.objects.store import ObjectInfo, ObjectStore

_FEW = 4
_OTHERS = 2
"""Listed objects per wanted key, in addition to `_SPARE`, after which the listing stops."""
_SPARE = 1000


def listed(store: "ObjectStore", keys: Sequence[str]) -> "dict[str, ObjectInfo | None]":
    """Return the objects under `keys`, None if there is none. Omits keys that a listing would take long to reach."""
    wanted = sorted(set(keys))
    if len(wanted) <= _FEW:
        return {}
    # The first key is omitted from the result: a listing starts after a given key.
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
