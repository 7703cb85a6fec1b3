"""A copy between two stores whose operations are counted."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from infra.copies import CopyStore
from infra.copies.copy import Copied, copy_object
from mizzen.objects.store import Fetch

PART = 1000


class Watched:
    """A source that prevents server-side copies; it counts the bytes read and calls `before` with each position."""

    def __init__(self, inner: CopyStore, before: Callable[[int], object] = lambda _: None) -> None:
        self._inner = inner
        self._before = before
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def opened(self, key: str) -> Iterator[Fetch]:
        with self._inner.opened(key) as fetch:

            def counted(into: memoryview, start: int) -> int:
                self._before(start)
                count = fetch(into, start)
                self.read_bytes += count
                return count

            yield counted


def bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def copied_object(source: Any, target: CopyStore, key: str = "a/x", **options: Any) -> Copied:
    return copy_object(source, target, key, **{"name": "test", "part_bytes": PART, **options})


def copy(source: Any, target: CopyStore, **options: Any) -> int:
    return copied_object(source, target, **options).moved_bytes
