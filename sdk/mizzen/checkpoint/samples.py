"""Samples of a part's content. If the samples of two contents differ, so do the contents."""

from collections.abc import Sequence

from mizzen.checkpoint.parts import Chunk

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def sample(chunks: Sequence[Chunk], size_bytes: int) -> bytes:
    """Return bytes sampled at evenly spaced offsets of the content."""
    wanted = [size_bytes * n // _SAMPLES for n in range(_SAMPLES)]
    found = []
    start = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while wanted and wanted[0] < start + view.nbytes:
            offset = wanted.pop(0) - start
            found.append(bytes(view[offset : offset + _SAMPLE_BYTES]))
        start += view.nbytes
    return b"".join(found)
