"""The tensors of a part by its file's header alone: no tensor is read."""

import struct
from dataclasses import dataclass

from mizzen.checkpoint import tensorfile
from mizzen.checkpoint.errors import CorruptCheckpointError
from mizzen.checkpoint.log import readable
from mizzen.checkpoint.manifest import Part
from mizzen.objects.store import ObjectStore


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
        head = store.get_range(part.key, 0, tensorfile.LENGTH.size)
    try:
        end = tensorfile.header_end(head, part.size_bytes)
        with readable(part.key):
            text = store.get_range(part.key, tensorfile.LENGTH.size, end)
        _, entries = tensorfile.header(text, part.size_bytes - end)
        return tuple(TensorInfo(e.name, str(e.dtype), tuple(map(int, e.shape)), e.size_bytes) for e in entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CorruptCheckpointError(f"{part.key}: its header cannot be read: {error!r}") from error
