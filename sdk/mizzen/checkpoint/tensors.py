"""Converts numpy arrays and torch tensors to bytes with a type and a shape, and back. Saving imports neither library.

A type that safetensors lacks is stored as another type, and the tree records the original type:

| numpy or torch type | in the file |
| --- | --- |
| complex64, complex128 | F32, F64 with an additional last axis of length 2: real and imaginary part |
| float8_e8m0fnu, float8_e4m3fnuz, float8_e5m2fnuz | U8, the same bits |
"""

import importlib
import math
import sys
from _pickle import PickleBuffer
from collections.abc import Callable, Hashable
from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError, NotYetError, StateError
from mizzen.objects.store import Chunk

Library: TypeAlias = Literal["numpy", "torch"]

SMALL_BYTES = 64 << 10
"""Tensors below this size are copied: a copy is cheaper than a separate chunk."""

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
"""Bytes per element of each safetensors type that is used."""

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
_SHORT = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Types of torch, and of numpy if `ml_dtypes` is imported, as by JAX."""
_TORCH = _NUMPY | _SHORT
_PAIRS = {"complex64": "F32", "complex128": "F64"}

# safetensors has types for these, but some of its readers do not support them.
_BITS = {"float8_e8m0fnu": "U8", "float8_e4m3fnuz": "U8", "float8_e5m2fnuz": "U8"}
_NATIVE = _TORCH
_STORED_AS = {"numpy": _TORCH | _PAIRS, "torch": _TORCH | _PAIRS | _BITS}
_NAMES = {tag: name for name, tag in _NATIVE.items()}
NUMPY_TYPES = frozenset(_STORED_AS["numpy"])
"""Names of the numpy types whose arrays and scalars can be stored."""


class Stored(NamedTuple):  # Ten thousand of them are created twice as fast as dataclasses.
    """Describes how one array or tensor is stored in a file."""

    library: Library
    """The library whose object was saved, and is created by a load."""
    dtype: str
    """Type in the file, a key of `WIDTHS`."""
    shape: tuple[int, ...]
    """Shape in the file; for complex types with the additional axis."""
    was: str | None
    """Name of the original type in its library, if it is stored as another type."""
    read: Callable[[], Chunk]
    """Returns the elements in C order, little endian: the live memory if it is large and laid out so, else a copy."""
    identity: Hashable
    """Equal for objects that view the same elements of the same memory, such as tied weights."""
    plain: bool = False
    """Whether it is a torch tensor on the CPU whose memory can be written to the file unchanged."""
    on_gpu: Any = None
    """The tensor, if it is on a GPU, from which `mizzen.checkpoint.gpu_copies` can copy it; else None."""


def loaded(name: str) -> Any:
    """Return the module `name` if it is imported, else None. If it is not imported, no object of it can exist.

    If another thread is importing it, wait for the end of that.
    """
    module = sys.modules.get(name)
    is_partial = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return importlib.import_module(name) if is_partial else module


def stored(where: str, value: Any) -> Stored | None:
    """Describe how an array or tensor is stored; None if `value` is neither. `where` names it in error messages.

    Raises:
        StateError: the type or layout cannot be stored.
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
        # Copies only if the array is not in C order or not little endian. Short types have no buffer.
        plain = array.view(f"u{array.itemsize}") if name in _SHORT else array
        flat = plain.astype(plain.dtype.newbyteorder("<"), order="C", copy=False)
        return PickleBuffer(flat).raw() if array.size else b""

    interface = array.__array_interface__
    place = interface["data"][0] if array.size else id(array)
    return Stored(
        library="numpy",
        dtype=_STORED_AS["numpy"][name],
        shape=_file_shape(name, array.shape),
        was=None if name in _NATIVE else name,
        read=read,
        identity=("numpy", place, array.shape, array.strides, array.dtype.str, name),
    )


def axes_in_memory(array: Any) -> list[int] | None:
    """Return the axes of an array of numpy in the order of its memory; None if it is in C order, or has gaps.

    Kernels round differently for other orders. A transposed array, or the result of a solver, is in Fortran's order.
    """
    if array.flags.c_contiguous:
        return None
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    return order if array.transpose(order).flags.c_contiguous else None


def _of_tensor(where: str, tensor: Any, torch: ModuleType) -> Stored:
    # Fast path for most tensors: a state can have ten thousand of them, and the general path takes ten times as long.
    tag = plain_types(torch).get(tensor.dtype)
    if (
        tag is not None
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and (place := tensor.data_ptr())
    ):
        shape = tuple(tensor.shape)
        # An address of a GPU differs from all addresses of the host and of other GPUs.
        identity = ("torch", place, shape, tag)
        if is_on_gpu(tensor):
            return Stored("torch", tag, shape, None, lambda: _memory(tensor.detach().cpu()), identity, on_gpu=tensor)
        return Stored("torch", tag, shape, None, lambda: _memory(tensor), identity, True)
    if kind := _unstored(tensor, torch):
        raise StateError(f"{where}: {kind} cannot be stored; use plain strided tensors, such as its components")
    if torch.nn.parameter.is_lazy(tensor):
        raise NotYetError(f"{where}: a parameter of a lazy module has no values to store")
    if tensor.device.type == "meta":
        raise StateError(f"{where}: a tensor on the device 'meta' has no values to store")
    name = str(tensor.dtype).removeprefix("torch.")
    _check_type(where, "torch", name, str(tensor.dtype))
    place = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
    if not place:
        raise StateError(
            f"{where}: the {type(tensor).__name__} has no memory, as if it was freed or is fake: nothing to store"
        )
    signs = (tensor.is_conj(), tensor.is_neg())
    where_in = (str(tensor.device), place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return Stored(
        library="torch",
        dtype=_STORED_AS["torch"][name],
        shape=_file_shape(name, tuple(tensor.shape)),
        was=None if name in _NATIVE else name,
        # Copies only if the tensor is on another device, not in C order, or a lazy conjugate or negative.
        read=lambda: _memory(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()),
        identity=("torch", *where_in, name, signs),
        on_gpu=tensor if is_on_gpu(tensor) else None,
    )


def is_on_gpu(tensor: Any) -> bool:
    """Return whether a torch tensor is in the memory of a GPU of CUDA or ROCm."""
    return bool(tensor.is_cuda)


@cache
def plain_types(torch: ModuleType) -> dict[Any, str]:
    """Map the torch types that safetensors supports to their safetensors names."""
    return {getattr(torch, name): tag for name, tag in _TORCH.items() if hasattr(torch, name)}


def _unstored(tensor: Any, torch: ModuleType) -> str | None:
    """Return the kind of a tensor that cannot be stored, for an error message; None if it can be stored."""
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a tensor of {type(tensor).__name__}"
    if tensor.is_quantized or tensor.is_nested:
        return "a quantised tensor" if tensor.is_quantized else "a nested tensor"
    return None if tensor.layout is torch.strided else f"a tensor of {tensor.layout}"


def _memory(tensor: Any) -> Chunk:
    """Return the bytes of a contiguous CPU tensor: a copy if it is small, else a view that keeps the tensor alive.

    Does not use numpy, which may not be installed.
    """
    size_bytes = tensor.nbytes
    if size_bytes < SMALL_BYTES:
        import ctypes

        return ctypes.string_at(tensor.data_ptr(), size_bytes) if size_bytes else b""
    return live_memory(tensor)


def live_memory(tensor: Any) -> memoryview:
    """Return a view of the memory of a non-empty, contiguous CPU tensor. The view keeps the tensor alive."""
    import ctypes  # Not at the start: it takes 4 ms of CPU, and torch and numpy import it anyway.

    size_bytes = tensor.nbytes
    memory = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return PickleBuffer(memory).raw()


def _check_type(where: str, library: Library, name: str, shown: str) -> None:
    if name not in _STORED_AS[library]:
        kind = "arrays" if library == "numpy" else "tensors"
        raise StateError(f"{where}: {kind} of {shown} cannot be stored; use one of {', '.join(_STORED_AS[library])}")


def _file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 2) if name in _PAIRS else shape


def library_of(name: Library, part: str) -> Any:
    """Import numpy or torch, to rebuild its objects.

    Raises:
        CheckpointError: the library is not installed.
    """
    try:
        return __import__(name)
    except ImportError as error:
        what = "numpy arrays" if name == "numpy" else "torch tensors"
        raise CheckpointError(f"{part} holds {what}: install {name} to load it (pip install {name})") from error


def numpy_type(name: str, part: str) -> Any:
    """Return the numpy type of this name, which is in `NUMPY_TYPES`.

    Raises:
        CheckpointError: numpy is not installed, or ml_dtypes, which defines the type.
    """
    numpy = library_of("numpy", part)
    if name in _SHORT:
        try:
            import ml_dtypes  # noqa: F401
        except ImportError as error:
            message = f"{part} holds numpy arrays of {name}: install ml_dtypes to load it (pip install ml_dtypes)"
            raise CheckpointError(message) from error
    return numpy.dtype(name)


def rebuilt(
    library: Library,
    dtype: str,
    shape: list[int],
    was: str | None,
    data: memoryview,
    part: str,
    order: list[int] | None = None,
) -> Any:
    """Rebuild the array or CPU tensor that `Stored` describes, as a writable view of `data`.

    An array with an `order` of its axes (`axes_in_memory`) is a copy.

    Raises:
        CheckpointError: the library is not installed.
        CorruptCheckpointError: type, shape and size are inconsistent.
    """
    if was is not None and _STORED_AS[library].get(was) != dtype:
        raise CorruptCheckpointError(f"a tensor of {dtype} cannot be a {library} tensor of {was}")
    if dtype not in _NAMES or math.prod(shape) * WIDTHS[dtype] != data.nbytes:
        raise CorruptCheckpointError(f"a {library} tensor of {dtype} and shape {shape} cannot have {data.nbytes} bytes")
    module = library_of(library, part)
    if library == "numpy":
        array = module.frombuffer(data, numpy_type(_NAMES[dtype], part).newbyteorder("<"))
        array = array.view(was).reshape(shape[:-1]) if was else array.reshape(shape)
        if order is None:
            return array
        return module.ascontiguousarray(array.transpose(order)).transpose(module.argsort(order))
    native = getattr(module, _NAMES[dtype])
    # frombuffer rejects an empty buffer.
    tensor = module.frombuffer(data, dtype=native) if data.nbytes else module.empty(0, dtype=native)
    tensor = tensor.reshape(shape)
    if was in _PAIRS:
        return module.view_as_complex(tensor)
    return tensor.view(getattr(module, was)) if was else tensor
