"""Memory into which parts are read begins where the kernel copies fast."""

import ctypes
from pathlib import Path

import pytest

from mizzen.checkpoint.manifest import Part
from mizzen.checkpoint.part_reader import fetch_part
from mizzen.checkpoint.part_stream import stream
from mizzen.objects import checksums
from mizzen.objects.files import FileStore


def start(memory: memoryview) -> int:
    """Returns the address of a buffer, modulo a cache line."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 64


@pytest.mark.parametrize("size_bytes", [1, 300_000, 5_000_000])
def test_parts_are_read_into_memory_that_begins_at_a_cache_line(size_bytes: int, tmp_path: Path) -> None:
    store, content = FileStore(tmp_path), bytes(size_bytes)
    store.put("part", [content])
    part = Part("part", "part", "bytes", size_bytes, checksums.checksum("sha256", [content]))
    for ahead in (True, False):
        assert {start(piece) for piece in stream(store, part, ahead=ahead)} == {0}
    assert start(fetch_part(store, part)) == 0
