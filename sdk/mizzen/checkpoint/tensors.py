"""numpy arrays and torch tensors as bytes with a type and a shape, and back. Neither library is imported to save.

Types that safetensors files have not are stored as one that they have, and the tree says which they were:

| numpy or torch type | in the file |
| --- | --- |
| complex64, complex128 | F32, F64 with one more axis of length 2: real and imaginary part |
| float8_e8m0fnu, float8_e4m3fnuz, float8_e5m2fnuz | U8, the same bits |
"""

import ctypes
import math
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pickle import PickleBuffer
from types import ModuleType
from typing import Any, Literal, TypeAlias

from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError, NotYetError, StateError
from mizzen.objects.store import Chunk

Library: TypeAlias = Literal["numpy", "torch"]

SMALL_BYTES = 64 << 10
"""Below it a copy is cheaper than to handle the memory by itself."""

WIDTHS = {
    "BOOL": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "U8": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Bytes of one element of each type that a file has."""

_NUMPY = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_TORCH = _NUMPY | {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_PAIRS = {"complex64": "F32", "complex128": "F64"}
# Some readers of the format do not know these.
_BITS = {"float8_e8m0fnu": "U8", "float8_e4m3fnuz": "U8", "float8_e5m2fnuz": "U8"}
_NATIVE = {"numpy": _NUMPY, "torch": _TORCH}
_STORED_AS = {"numpy": _NUMPY | _PAIRS, "torch": _TORCH | _PAIRS | _BITS}
_NAMES: dict[Library, dict[str, str]] = {
    "numpy": {tag: name for name, tag in _NUMPY.items()},
    "torch": {tag: name for name, tag in _TORCH.items()},
}
NUMPY_TYPES = frozenset(_STORED_AS["numpy"])
"""Types of numpy, by name, whose arrays and scalars are stored."""


@dataclass(frozen=True)
class Stored:
    """A tensor as it is in a file."""

    library: Library
    """Whose object it was and will be."""
    dtype: str
    """Type in the file, one of `WIDTHS`."""
    shape: tuple[int, ...]
    """Shape in the file, that of a complex one with its axis of pairs."""
    was: str | None
    """The type's name in its library where the file's does not say it."""
    read: Callable[[], Chunk]
    """Gives its elements in C order, little endian: the live memory where it has that form and is large, or a copy."""
    identity: Hashable
    """Equal for objects that are the same elements of the same memory, as tied weights are."""
    plain: bool = False
    """Whether it is a torch tensor on the CPU whose memory has the file's form."""


def loaded(name: str) -> Any:
    """The module `name` if somebody has imported it, else None: without it there is nothing of it to store."""
    return sys.modules.get(name)


def stored(where: str, value: Any) -> Stored | None:
    """How an array or a tensor is stored; None if `value` is neither. `where` names it in errors.

    Raises:
        StateError: it is of a type or layout that is not stored.
    """
    numpy, torch = loaded("numpy"), loaded("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _of_array(where, value)
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(where, value, torch)
    return None


def _of_array(where: str, array: Any) -> Stored:
    name = array.dtype.name
    _check_type(where, "numpy", name, str(array.dtype))

    def read() -> Chunk:
        # Copies only what is not in C order or of the other byte order.
        flat = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        return PickleBuffer(flat).raw() if array.size else b""

    interface = array.__array_interface__
    place = interface["data"][0] if array.size else id(array)
    return Stored(
        library="numpy",
        dtype=_STORED_AS["numpy"][name],
        shape=_file_shape(name, array.shape),
        was=None if name in _NUMPY else name,
        read=read,
        identity=("numpy", place, array.shape, array.strides, array.dtype.str),
    )


def _of_tensor(where: str, tensor: Any, torch: ModuleType) -> Stored:
    # Most tensors by far, and some states have ten thousand of them: the way below takes ten times as long.
    tag = _plain_types(torch).get(tensor.dtype)
    if (
        tag is not None
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and (place := tensor.data_ptr())
    ):
        shape = tuple(tensor.shape)
        return Stored("torch", tag, shape, None, lambda: _memory(tensor), ("torch", place, shape, tag), True)
    if kind := _unstored(tensor, torch):
        raise StateError(f"{where}: {kind} is not stored; give plain strided tensors, such as its parts")
    if torch.nn.parameter.is_lazy(tensor):
        raise NotYetError(f"{where}: a parameter of a lazy module has no values to store")
    if tensor.device.type == "meta":
        raise StateError(f"{where}: a tensor on the device 'meta' has no values to store")
    name = str(tensor.dtype).removeprefix("torch.")
    _check_type(where, "torch", name, str(tensor.dtype))
    place = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
    if not place:
        raise StateError(f"{where}: a {type(tensor).__name__} without memory has no values to store")
    signs = (tensor.is_conj(), tensor.is_neg())
    where_in = (str(tensor.device), place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return Stored(
        library="torch",
        dtype=_STORED_AS["torch"][name],
        shape=_file_shape(name, tuple(tensor.shape)),
        was=None if name in _TORCH else name,
        # Copies only what is on another device, not in C order, or a lazy conjugate or negative.
        read=lambda: _memory(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()),
        identity=("torch", *where_in, name, signs),
    )


@cache
def _plain_types(torch: ModuleType) -> dict[Any, str]:
    """Torch's types that a file has as they are."""
    return {getattr(torch, name): tag for name, tag in _TORCH.items() if hasattr(torch, name)}


def _unstored(tensor: Any, torch: ModuleType) -> str | None:
    """What kind of a tensor it is, if that is none whose elements can be stored."""
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a tensor of {type(tensor).__name__}"
    if tensor.is_quantized or tensor.is_nested:
        return "a quantised tensor" if tensor.is_quantized else "a nested tensor"
    return None if tensor.layout is torch.strided else f"a tensor of {tensor.layout}"


def _memory(tensor: Any) -> Chunk:
    """The memory of a contiguous tensor on the CPU, which it keeps alive; of a small one a copy.

    Not through numpy: that may not be there.
    """
    size_bytes = tensor.nbytes
    if size_bytes < SMALL_BYTES:
        return ctypes.string_at(tensor.data_ptr(), size_bytes) if size_bytes else b""
    return live_memory(tensor)


def live_memory(tensor: Any) -> memoryview:
    """The memory of a contiguous tensor on the CPU that is not empty. It keeps the tensor alive."""
    size_bytes = tensor.nbytes
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return PickleBuffer(memory).raw()


def memory_of(tensor: Any) -> tuple[int, memoryview] | None:
    """Address and memory of a torch tensor that is on the CPU and in C order; None of others and of empty ones."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return (tensor.data_ptr(), live_memory(tensor)) if tensor.nbytes else None


def _check_type(where: str, library: Library, name: str, shown: str) -> None:
    if name not in _STORED_AS[library]:
        kind = "arrays" if library == "numpy" else "tensors"
        raise StateError(f"{where}: {kind} of {shown} are not stored; one of {', '.join(_STORED_AS[library])} is")


def _file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 2) if name in _PAIRS else shape


def library_of(name: Library, part: str) -> Any:
    """Import numpy or torch, to give back what was theirs.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return __import__(name)
    except ImportError as error:
        what = "numpy arrays" if name == "numpy" else "torch tensors"
        raise CheckpointError(f"{part} holds {what}: install {name} to load it (pip install {name})") from error


def rebuilt(library: Library, dtype: str, shape: list[int], was: str | None, data: memoryview, part: str) -> Any:
    """The array or tensor (on the CPU) that `Stored` describes, as a writable view of `data`.

    Raises:
        CheckpointError: its library is not installed.
        CorruptCheckpointError: type, shape and size do not fit together.
    """
    if was is not None and _STORED_AS[library].get(was) != dtype:
        raise CorruptCheckpointError(f"a tensor of {dtype} cannot have been {library}'s {was}")
    if dtype not in _NATIVE[library].values() or math.prod(shape) * WIDTHS[dtype] != data.nbytes:
        raise CorruptCheckpointError(f"a tensor of {library}, {dtype}, {shape} does not have {data.nbytes} bytes")
    module = library_of(library, part)
    if library == "numpy":
        array = module.frombuffer(data, module.dtype(_NAMES["numpy"][dtype]).newbyteorder("<"))
        return array.view(was).reshape(shape[:-1]) if was else array.reshape(shape)
    native = getattr(module, _NAMES["torch"][dtype])
    # An empty buffer is refused by frombuffer.
    tensor = module.frombuffer(data, dtype=native) if data.nbytes else module.empty(0, dtype=native)
    tensor = tensor.reshape(shape)
    if was in _PAIRS:
        return module.view_as_complex(tensor)
    return tensor.view(getattr(module, was)) if was else tensor
