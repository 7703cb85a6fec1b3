"""The tensors of a part by its file's header alone: no tensor is read."""

import json
import struct
from dataclasses import dataclass
from typing import Any

from mizzen.checkpoint.errors import CorruptCheckpointError
from mizzen.checkpoint.log import readable
from mizzen.checkpoint.manifest import Part
from mizzen.checkpoint.tensorfile import METADATA
from mizzen.objects.store import ObjectStore

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file describes it."""

    name: str
    dtype: str
    """As safetensors names it: `F32`, `BF16`."""
    shape: tuple[int, ...]
    size_bytes: int


def tensors_of(store: ObjectStore, part: Part) -> tuple[TensorInfo, ...]:
    """What tensors a part of the kind `tensors` has, in the order of its file. Its checksum is not verified.

    Raises:
        CorruptCheckpointError: the part is missing, or its header cannot be read.
        CheckpointError: it cannot be read for another reason.
    """
    with readable(part.key):
        head = store.get_range(part.key, 0, _LENGTH.size)
        if len(head) < _LENGTH.size:
            raise CorruptCheckpointError(f"{part.key} is shorter than a header")
        (length,) = _LENGTH.unpack(head)
        end = _LENGTH.size + length
        if end > part.size_bytes:
            raise CorruptCheckpointError(f"{part.key}: its header would end at byte {end} of {part.size_bytes}")
        text = store.get_range(part.key, _LENGTH.size, end)
    try:
        found = [_tensor(name, entry) for name, entry in json.loads(text).items() if name != METADATA]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{part.key}: its header cannot be read: {error!r}") from error
    return tuple(info for _, info in sorted(found, key=lambda pair: (pair[0], pair[1].name)))


def _tensor(name: str, entry: Any) -> tuple[int, TensorInfo]:
    low, high = (int(offset) for offset in entry["data_offsets"])
    return low, TensorInfo(name, str(entry["dtype"]), tuple(int(length) for length in entry["shape"]), high - low)
