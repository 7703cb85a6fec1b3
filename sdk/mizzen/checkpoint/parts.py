"""Parts of a state as files: bytes as they are, JSON, and trees that hold numpy arrays in safetensors form. No pickle.

A tree is dicts (string keys) and lists of JSON values and arrays. Its arrays become tensors named by their path
(`layer/weight`), and the tree itself, with `{"$array": name}` in their places, is kept in the file's metadata, so that
any safetensors reader finds the tensors and this one gives back the same tree. Tuples come back as lists.
"""

import json
import struct
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError, StateError

Chunk: TypeAlias = bytes | bytearray | memoryview

_ARRAY = "$array"
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_DTYPES = {
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
_DTYPE_NAMES = {tag: name for name, tag in _DTYPES.items()}
_EXTENSIONS = {"bytes": "bin", "json": "json", "arrays": "safetensors"}


def file_name(name: str, kind: str) -> str:
    """The file of the part `name`."""
    return f"part-{name}.{_EXTENSIONS[kind]}"


def encode(name: str, value: Any) -> tuple[str, list[Chunk]]:
    """The kind of a part's value and its file's content.

    Raises:
        StateError: something in it is neither bytes at the top, nor JSON, nor a numpy array.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes", [value.tobytes() if isinstance(value, memoryview) else value]
    arrays: dict[str, Any] = {}
    tree = _walk(name, value, (), arrays)
    text = json.dumps(tree, separators=(",", ":"))
    return ("arrays", _pack(text, arrays)) if arrays else ("json", [text.encode()])


def decode(kind: str, data: bytearray) -> Any:
    """The value of a part from its file's content. Arrays are writable views of `data`.

    Raises:
        CorruptCheckpointError: it is not of that kind.
        CheckpointError: it holds arrays and numpy is not installed.
    """
    if kind == "bytes":
        return bytes(data)
    try:
        if kind == "json":
            return json.loads(data)
        if kind == "arrays":
            return _unpack(data)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CorruptCheckpointError(f"its {kind} cannot be read: {error!r}") from error
    raise CorruptCheckpointError(f"its kind {kind!r} is not known to this version")


def _walk(part: str, value: Any, path: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    """The tree with arrays replaced by references; the arrays go to `arrays`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # Arrays can only be there if somebody imported numpy: this never does.
    numpy = sys.modules.get("numpy")
    where = f"part {part!r}" + (f" at {'/'.join(path)}" if path else "")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return value.item()
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.name not in _DTYPES:
            raise StateError(f"{where}: arrays of {value.dtype} are not stored; one of {', '.join(_DTYPES)} is")
        name = "/".join(key.replace("~", "~0").replace("/", "~1") for key in path) if path else "array"
        if name == _METADATA:
            raise StateError(f"{where}: an array cannot have this name, which the format uses itself")
        arrays[name] = value
        return {_ARRAY: name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise StateError(f"{where}: the key {key!r} is {type(key).__name__}; keys must be strings")
        if _ARRAY in value:
            raise StateError(f"{where}: the key {_ARRAY!r} is what the format uses itself")
        return {str(key): _walk(part, item, (*path, str(key)), arrays) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(part, item, (*path, str(index)), arrays) for index, item in enumerate(value)]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise StateError(f"{where}: {kind} is not stored; give JSON values, numpy arrays, or bytes as a part of their own")


def _pack(tree: str, arrays: dict[str, Any]) -> list[Chunk]:
    """A safetensors file: header length, JSON header, data without gaps, the widest types first to stay aligned."""
    header: dict[str, Any] = {_METADATA: {"tree": tree}}
    chunks: list[Chunk] = []
    offset = 0
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        flat = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False).reshape(-1)
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + flat.nbytes],
        }
        if flat.nbytes:
            chunks.append(flat.view("u1").data)
        offset += flat.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [_LENGTH.pack(len(text)), text, *chunks]


def _unpack(data: bytearray) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise CheckpointError("this checkpoint holds arrays: install numpy to load it") from error
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    header = json.loads(data[_LENGTH.size : start])
    body = memoryview(data)[start:]
    arrays: dict[str, Any] = {}
    for name, entry in header.items():
        if name != _METADATA:
            low, high = entry["data_offsets"]
            dtype = numpy.dtype(_DTYPE_NAMES[entry["dtype"]]).newbyteorder("<")
            arrays[name] = numpy.frombuffer(body[low:high], dtype).reshape(entry["shape"])
    return _restore(json.loads(header[_METADATA]["tree"]), arrays)


def _restore(tree: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_ARRAY}:
            return arrays[tree[_ARRAY]]
        return {key: _restore(item, arrays) for key, item in tree.items()}
    return [_restore(item, arrays) for item in tree] if isinstance(tree, list) else tree
