"""Lists the tensors of a part by reading only the header of its safetensors file."""

import struct
from dataclasses import dataclass

from mizzen.checkpoint import tensorfile
from mizzen.checkpoint.errors import CorruptCheckpointError
from mizzen.checkpoint.log import readable
from mizzen.checkpoint.manifest import Part
from mizzen.objects.store import ObjectStore


@dataclass(frozen=True)
class TensorInfo:
    """Name, type and shape of one tensor, from the file's header."""

    name: str
    dtype: str
    """The safetensors name of the type, such as `F32` or `BF16`."""
    shape: tuple[int, ...]
    size_bytes: int


def tensors_of(store: ObjectStore, part: Part) -> tuple[TensorInfo, ...]:
    """Return the tensors of a part of kind `tensors`, in file order. The part's checksum is not verified.

    Raises:
        CorruptCheckpointError: the part is missing, or its header is malformed.
        CheckpointError: the part cannot be read for another reason.
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
        raise CorruptCheckpointError(f"{part.key}: the safetensors header cannot be read: {error!r}") from error
