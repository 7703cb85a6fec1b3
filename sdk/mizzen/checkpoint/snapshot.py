"""Copies a state in memory, so that a background thread can write it while training continues."""

from collections.abc import Callable, Mapping, Sequence

from mizzen.objects.buffers import mapped, padded
from mizzen.objects.store import Chunk
from mizzen.objects.workers import Workers

_COPIES = 2
"""Threads that copy concurrently: one core does not saturate the memory bandwidth."""
_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20


class Snapshot:
    """A buffer that is reused for every copy: its pages are already mapped, so later copies are faster."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())

    def take(
        self, encoded: Mapping[str, tuple[str, Sequence[Chunk]]], owned: Callable[[Chunk], bool] = lambda _: False
    ) -> dict[str, tuple[str, list[Chunk]]]:
        """Copy the contents of the parts. The copies are valid until the next `take`.

        Chunks for which `owned` returns True are already copies, and are returned unchanged.
        """
        need = sum(
            padded(memoryview(chunk).nbytes) for _, chunks in encoded.values() for chunk in chunks if not owned(chunk)
        )
        if need > len(self._memory):
            # Allocate new memory instead of resizing: views of the old memory may still be in use.
            self._memory = mapped(need + need // 16)
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
                used += padded(len(source))
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
                for done in [workers.submit(move, *pair) for pair in large]:
                    done.result()
        return taken


def move(target: memoryview, source: memoryview) -> None:
    """Copy memory without holding the GIL, which a slice assignment would hold. Both must be writable."""
    import ctypes  # See `tensors.live_memory`.

    to, of = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))
    ctypes.memmove(to, of, len(source))
