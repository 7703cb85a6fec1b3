"""Reads and writes safetensors files: a JSON header, then the tensors. Any safetensors reader can open them.

    8 bytes, little endian       length of the header
    header                       {"__metadata__": {...strings}, name: {"dtype", "shape", "data_offsets": [low, high]}}
    tensors                      without gaps, the widest types first, so that each is aligned to its width

The header is padded with spaces, so that the tensors begin at a multiple of 64 bytes.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from mizzen.checkpoint.tensors import SMALL_BYTES, WIDTHS, Stored
from mizzen.objects.store import Chunk

METADATA = "__metadata__"

LENGTH = struct.Struct("<Q")
_ALIGNED_BYTES = 64


def pack(
    metadata: Mapping[str, str],
    tensors: Mapping[str, Stored],
    copied: Callable[[Sequence[Any]], memoryview] | None = None,
) -> list[Chunk]:
    """Return the content of a file as chunks. A large tensor is a chunk without a copy; small tensors share a chunk.

    `copied` returns the memory for the content of consecutive tensors on GPUs (`GpuCopies.take`).
    """
    order = in_order(tensors)
    chunks: list[Chunk] = []
    for on_gpu, group in groupby(order, lambda item: copied is not None and item[1].on_gpu is not None):
        if on_gpu and copied is not None:
            chunks.append(copied([tensor.on_gpu for _, tensor in group]))
        else:
            chunks += _in_memory([tensor for _, tensor in group])
    return [head(metadata, entries(order)), *chunks]


def _in_memory(tensors: Sequence[Stored]) -> Iterator[Chunk]:
    small: list[Chunk] = []
    for tensor in tensors:
        data = tensor.read()
        if len(data) < SMALL_BYTES:
            small.append(data)
            continue
        yield from _joined(small)
        yield data
    yield from _joined(small)


def in_order(tensors: Mapping[str, Stored]) -> list[tuple[str, Stored]]:
    """Return the tensors with their names, in file order."""
    return sorted(tensors.items(), key=lambda item: (-WIDTHS[item[1].dtype], item[0]))


def entries(order: Sequence[tuple[str, Stored]]) -> str:
    """Return the tensor entries of a file's header, as JSON without the outer braces."""
    out: dict[str, Any] = {}
    low = 0
    for name, tensor in order:
        high = low + math.prod(tensor.shape) * WIDTHS[tensor.dtype]
        out[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [low, high]}
        low = high
    return json.dumps(out, separators=(",", ":"), allow_nan=False)[1:-1]


def head(metadata: Mapping[str, str], entries: str) -> bytes:
    """Return the start of a file, up to the tensors: the header's length and the header."""
    said = json.dumps({METADATA: dict(metadata)}, separators=(",", ":"), allow_nan=False)
    text = (f"{said[:-1]},{entries}}}" if entries else said).encode()
    text += b" " * (-(len(text) + LENGTH.size) % _ALIGNED_BYTES)
    return LENGTH.pack(len(text)) + text


def _joined(small: list[Chunk]) -> list[Chunk]:
    """Join the chunks in `small` to at most one chunk, and clear `small`."""
    joined = b"".join(small)
    small.clear()
    return [joined] if joined else []


class TensorEntry(NamedTuple):
    """The header's entry for one tensor."""

    name: str
    dtype: str
    """The safetensors name of the type, such as `F32` or `BF16`."""
    shape: list[int]
    size_bytes: int


Tensors: TypeAlias = dict[str, tuple[str, list[int], memoryview]]
"""Tensor name to type, shape and bytes."""
Content: TypeAlias = tuple[dict[str, str], Tensors]
"""Metadata and tensors of a file."""


def header_end(head: bytes | bytearray, file_bytes: int) -> int:
    """Return the offset at which the tensors of a file begin, from the first bytes of the file.

    Raises:
        ValueError, struct.error: it is not a safetensors file.
    """
    (length,) = LENGTH.unpack_from(head)
    end = LENGTH.size + int(length)
    if end > file_bytes:
        raise ValueError(f"the header would end at byte {end}, but the file has {file_bytes} bytes")
    return end


def header(text: bytes | bytearray, body_bytes: int) -> tuple[dict[str, str], list[TensorEntry]]:
    """Parse a header into the file's metadata and its tensors, in file order. `body_bytes` is the size of the tensors.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the header is malformed, or does not match the size.
    """
    found = json.loads(text)
    metadata = found.pop(METADATA, {})
    entries: list[TensorEntry] = []
    end = 0
    for name, entry in sorted(found.items(), key=lambda item: item[1]["data_offsets"]):
        low, high = entry["data_offsets"]
        if low != end or high < low or high > body_bytes:
            raise ValueError(f"the tensor {name!r} has bytes {low} to {high} of {body_bytes}; it should begin at {end}")
        entries.append(TensorEntry(name, str(entry["dtype"]), [int(size) for size in entry["shape"]], high - low))
        end = high
    if end != body_bytes:
        raise ValueError(f"the tensors end at byte {end}, but should end at {body_bytes}")
    return metadata, entries


def unpack(data: bytearray | memoryview) -> Content:
    """Parse a file that is in memory; the tensors' bytes are views of `data`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, struct.error: it is not a valid safetensors file.
    """
    view = memoryview(data)
    start = header_end(bytes(view[: LENGTH.size]), len(view))
    metadata, entries = header(bytes(view[LENGTH.size : start]), len(view) - start)
    tensors = {}
    for entry in entries:
        tensors[entry.name] = (entry.dtype, entry.shape, view[start : start + entry.size_bytes])
        start += entry.size_bytes
    return metadata, tensors
