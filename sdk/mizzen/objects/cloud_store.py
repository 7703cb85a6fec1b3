"""Base class of stores in cloud buckets: batched look-ups, and a random generator for the client libraries."""

import random
import sys
from abc import abstractmethod
from collections.abc import Sequence

from mizzen.objects.store import MissingObject, ObjectInfo, ObjectStore, check_key

_FEW = 4
_OTHERS = 2
"""Listed objects per wanted key, in addition to `_SPARE`, after which the listing stops."""
_SPARE = 1000

_own = random.Random()


def detach(*libraries: str) -> None:
    """Replace the module `random` in all loaded modules of these libraries by a separate generator.

    The libraries draw from the global generator of `random`, for example for boundaries of uploads and for retry
    delays. A save would thus change the numbers that the training draws next, and a resumed run would differ from an
    uninterrupted one.
    """
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] in libraries and getattr(module, "random", None) is random:
            module.random = _own  # type: ignore[attr-defined]


class CloudStore(ObjectStore):
    """Base class of stores in a bucket, below a prefix. An object is durable when the cloud has acknowledged it."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{check_key(prefix)}/" if prefix else ""

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return a range of an object; see `ObjectStore.get_range`."""
        if start < end:
            return self._range(key, start, end)
        if self.size(key) is None:
            raise self._missing(key)
        return b""

    @abstractmethod
    def _range(self, key: str, start: int, end: int) -> bytes:
        """Return a range that is not empty; see `get_range`."""

    def stat_all(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """Look up several keys by one listing; see `ObjectStore.stat_all`. Omits keys that take long to reach."""
        wanted = sorted(set(keys))
        if len(wanted) <= _FEW:
            return {}
        # The first key is omitted from the result: a listing starts after a given key.
        first, last = wanted[0], wanted[-1]
        common = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
        budget = _SPARE + _OTHERS * len(wanted)
        found: dict[str, ObjectInfo | None] = {}
        reached = last
        for info in self.list(first[:common], after=first):
            if info.key > last:
                break
            budget -= 1
            if budget < 0:
                reached = info.key
                break
            found[info.key] = info
        return {key: found.get(key) for key in wanted[1:] if key <= reached}

    def forget(self, key: str) -> None:
        """Do nothing: there is no page cache. See `ObjectStore.forget`."""

    def tidy(self) -> None:
        """Do nothing: a cloud cannot tell whether a writer has died. See `ObjectStore.tidy`."""

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _missing(self, key: str) -> MissingObject:
        return MissingObject(f"no object {key!r} in {self.uri('')}")
