"""Files in safetensors form: a header in JSON, and tensors one after the other. Any reader of that format opens them.

    8 bytes, little endian       length of the header
    header                       {"__metadata__": {...strings}, name: {"dtype", "shape", "data_offsets": [low, high]}}
    tensors                      without gaps, the widest types first, so that each is aligned to its width

The header is filled up with spaces, so that the tensors begin at a multiple of 64 bytes.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

from mizzen.checkpoint.tensors import WIDTHS, Stored
from mizzen.objects.store import Chunk

METADATA = "__metadata__"

_LENGTH = struct.Struct("<Q")
_ALIGNED_BYTES = 64


def pack(metadata: Mapping[str, str], tensors: Mapping[str, Stored]) -> list[Chunk]:
    """The content of a file. The tensors' chunks are theirs, not copies."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    chunks: list[Chunk] = []
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-WIDTHS[item[1].dtype], item[0])):
        data = tensor.read()
        size_bytes = len(data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size_bytes],
        }
        if size_bytes:
            chunks.append(data)
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNED_BYTES)
    return [_LENGTH.pack(len(text)) + text, *chunks]


def unpack(data: bytearray | memoryview) -> tuple[dict[str, str], dict[str, tuple[str, list[int], memoryview]]]:
    """The metadata of a file, and of each tensor its type, shape and bytes (a view of `data`).

    Raises:
        ValueError, KeyError, TypeError, struct.error: it is not such a file.
    """
    view = memoryview(data)
    (length,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + length
    if start > len(view):
        raise ValueError(f"its header would end at byte {start} of {len(view)}")
    header = json.loads(bytes(view[_LENGTH.size : start]))
    metadata = header.pop(METADATA, {})
    body = view[start:]
    tensors = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        if not 0 <= low <= high <= len(body):
            raise ValueError(f"the tensor {name!r} would be at bytes {low} to {high} of {len(body)}")
        tensors[name] = (entry["dtype"], entry["shape"], body[low:high])
    return metadata, tensors
