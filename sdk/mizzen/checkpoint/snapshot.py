"""A copy of a state in memory, from which it is written while the training goes on."""

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence

from mizzen.objects.store import Chunk
from mizzen.objects.workers import Workers

_COPIES = 2
"""Copies at the same time: one core does not fill the memory's bandwidth."""
_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20
_ALIGNED_BYTES = 64


class Snapshot:
    """Memory that is made once and used again by each copy: its pages are there, so later copies are fast."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def take(
        self, encoded: Mapping[str, tuple[str, Sequence[Chunk]]], owned: Callable[[Chunk], bool] = lambda _: False
    ) -> dict[str, tuple[str, list[Chunk]]]:
        """Copies of the parts' contents, which stay as they are until the next `take`.

        Chunks that are `owned` are copies already, and come back themselves.
        """
        need = sum(
            _aligned(memoryview(chunk).nbytes) for _, chunks in encoded.values() for chunk in chunks if not owned(chunk)
        )
        if need > len(self._memory):
            # Not a reallocation: views of the old memory may still be alive.
            self._memory = memoryview(mmap.mmap(-1, need + need // 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        taken: dict[str, tuple[str, list[Chunk]]] = {}
        large: list[tuple[memoryview, memoryview]] = []
        used = 0
        for name, (kind, chunks) in encoded.items():
            copies: list[Chunk] = []
            for chunk in chunks:
                if owned(chunk):
                    copies.append(chunk)
                    continue
                source = memoryview(chunk).cast("B")
                target = self._memory[used : used + len(source)]
                used += _aligned(len(source))
                copies.append(target)
                if len(source) < _SMALL_BYTES or source.readonly:
                    target[:] = source
                else:
                    large += [
                        (target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
                        for start in range(0, len(source), _PIECE_BYTES)
                    ]
            taken[name] = (kind, copies)
        if large:
            with Workers(_COPIES) as workers:
                for done in [workers.submit(_copy, pair) for pair in large]:
                    done.result()
        return taken


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _copy(pair: tuple[memoryview, memoryview]) -> None:
    """Copy without holding the interpreter's lock, which an assignment would."""
    target, source = pair
    ctypes.memmove(
        ctypes.addressof(ctypes.c_char.from_buffer(target)),
        ctypes.addressof(ctypes.c_char.from_buffer(source)),
        len(source),
    )
