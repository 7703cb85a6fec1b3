"""Encodes trees of Python values as JSON, with tensors and bytes stored separately. Loading a tree cannot run code.

Values that JSON supports are written unchanged. Every other value is an object with one key that begins with `$`, such
as `{"$tuple": [...]}`; `docs/state.md` has all of them.

Tensors are named by their path (`layer/weight`). Dicts keep their order. A subclass of dict loads as a dict, a
bytearray as bytes. A named tuple loads as its own class if that is already imported, else as a new class with the same
name and fields. Values that share the same memory, such as tied weights, are stored once and load as one object.
"""

import json
import math
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mizzen.checkpoint.errors import CorruptCheckpointError, StateError
from mizzen.checkpoint.tensorfile import METADATA, Tensors
from mizzen.checkpoint.tensors import (
    NUMPY_TYPES,
    Library,
    Stored,
    axes_in_memory,
    library_of,
    loaded,
    numpy_type,
    rebuilt,
    stored,
)
from mizzen.objects.store import Chunk

_WIDE_BITS = 1024
"""Longer integers are written in hexadecimal: Python limits the digits of decimal conversions."""

# `str.__str__` gives an enumeration member's value; its own `str()` gives its name.
_PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int, float: float, list: list}
_LIBRARIES: dict[str, Library] = {"$numpy": "numpy", "$torch": "torch"}


class Flat(NamedTuple):
    """A tree as JSON, and the tensors and bytes that were taken out of it."""

    text: str
    """The JSON text of the tree."""
    tensors: dict[str, Stored]
    """Tensors and bytes, by name."""
    found: dict[str, tuple[tuple[str, ...], Any]]
    """Name of each tensor to the path of its first occurrence, and its value."""
    leaves: list[tuple[str, Any]]
    """Name and value of each occurrence of a tensor, in tree order."""
    containers: list[Any]
    """Type, and keys or length, of each dict, list and tuple, in tree order."""


def flatten(part: str, value: Any) -> Flat:
    """Encode `value` as the tree of the part `part`.

    Raises:
        StateError: the tree holds a value that cannot be stored. The message gives its path.
    """
    walk = Flattening(part)
    try:
        text = text_of(walk.written(value, ()))
    except RecursionError:
        raise StateError(f"part {part!r}: the value contains itself, or is nested too deeply to be stored") from None
    return Flat(text, walk.tensors, walk.found, walk.leaves, walk.containers)


def text_of(tree: Any) -> str:
    """Return the JSON text of a tree of JSON values."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def restore(part: str, text: str | bytes | bytearray, tensors: Tensors) -> Any:
    """Rebuild the value that `flatten` encoded. Arrays and tensors are views of the bytes in `tensors`.

    Raises:
        CheckpointError: the tree holds arrays or tensors of a library that is not installed.
        CorruptCheckpointError, ValueError, KeyError, TypeError, RecursionError: the tree is malformed.
    """
    return _Restoring(part, tensors).read(json.loads(text))


class Flattening:
    """One traversal of a tree, which encodes it and collects its tensors."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.tensors: dict[str, Stored] = {}
        self.found: dict[str, tuple[tuple[str, ...], Any]] = {}
        """See `Flat.found`. Keeps the values alive, so that their addresses, which identify them, are not reused."""
        self.leaves: list[tuple[str, Any]] = []
        self.containers: list[Any] = []
        self._seen: dict[Any, str] = {}

    def written(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return the JSON form of a value."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= _WIDE_BITS else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            return self._mapping(value, path)
        where = f"part {self.part!r}" + (f" at {'/'.join(path)}" if path else "")
        if found := stored(where, value):
            name = self._set_aside(found, path, value)
            order = axes_in_memory(value) if found.library == "numpy" else None
            rest = [found.was] if order is None else [found.was, order]
            return {f"${found.library}": name if rest == [None] else [name, *rest]}
        return self._other(where, value, path)

    def _other(self, where: str, value: Any, path: tuple[str, ...]) -> Any:
        """Return the JSON form of the rarer types. Subclasses of basic types load as the basic type."""
        numpy = loaded("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in NUMPY_TYPES:
            little = value.astype(value.dtype.newbyteorder("<"))
            return {"$scalar": [value.dtype.name, little.tobytes().hex()]}
        if isinstance(value, bytes | bytearray | memoryview):
            data: Chunk = memoryview(value).cast("B") if memoryview(value).c_contiguous else bytes(value)
            return {"$bytes": self._set_aside(_of_bytes(data, id(value)), path, value)}
        if isinstance(value, set | frozenset):
            # Sorted by their text: the order of a set is not the same in another process.
            items = sorted((self.written(item, path) for item in value), key=text_of)
            return {"$set" if isinstance(value, set) else "$frozenset": items}
        if isinstance(value, deque):
            return {"$deque": [self._items(value, path), value.maxlen]}
        if isinstance(value, Counter):
            return {"$counter": self._pairs(value, path)}
        if isinstance(value, Mapping):
            content, metadata = self._mapping(value, path), getattr(value, "_metadata", None)
            if not isinstance(metadata, Mapping):
                return content
            return {"$state_dict": [content, self.written(metadata, (*path, "_metadata"))]}
        if isinstance(value, tuple):
            return self._tuple(value, path)
        if isinstance(value, complex):
            return {"$complex": [self.written(value.real, path), self.written(value.imag, path)]}
        for plain, convert in _PLAIN.items():
            if isinstance(value, plain):
                return self.written(convert(value), path)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name.startswith("jax"):
            raise StateError(f"{where}: {name} cannot be stored; track a Pytree of mizzen.integrations.jax instead")
        known = "numbers, strings, bytes, lists, tuples, dicts, sets, deques, numpy arrays and torch tensors"
        raise StateError(f"{where}: {name} cannot be stored; use {known}, or make it a part of its own: Pickled(value)")

    def _tuple(self, value: tuple[Any, ...], path: tuple[str, ...]) -> dict[str, Any]:
        kind, fields = type(value), getattr(value, "_fields", ())
        if not fields or not _are_fields(fields, len(value)):
            return {"$tuple": self._items(value, path)}
        self.containers.append((kind, *fields))
        items = [self.written(item, (*path, field)) for field, item in zip(fields, value, strict=True)]
        return {"$namedtuple": [kind.__module__, kind.__qualname__, list(fields), items]}

    def _items(self, values: Any, path: tuple[str, ...]) -> list[Any]:
        self.containers.append((type(values), len(values)))
        return [self.written(item, (*path, str(index))) for index, item in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> dict[str, Any]:
        self.containers.append((type(value), *value))
        plain = set(map(type, value)) <= {str}
        if plain and not (len(value) == 1 and next(iter(value)).startswith("$")):
            return {key: self.written(item, (*path, key)) for key, item in value.items()}
        return {"$dict": self._pairs(value, path)}

    def _pairs(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> list[Any]:
        pairs = []
        for key, item in value.items():
            if not isinstance(key, str | int | float | bool | bytes | tuple | None):
                where = f"part {self.part!r}" + (f" at {'/'.join(path)}" if path else "")
                kind = f"{type(key).__module__}.{type(key).__qualname__}"
                raise StateError(f"{where}: the key {key!r} is {kind}; use strings, numbers, None, bytes or tuples")
            below = (*path, str(key))
            pairs.append([self.written(key, below), self.written(item, below)])
        return pairs

    def _set_aside(self, tensor: Stored, path: tuple[str, ...], value: Any) -> str:
        """Record a tensor and return its name in the file. Tensors with the same memory get the same name."""
        name = self._seen.get(tensor.identity)
        if name is None:
            name = self._seen[tensor.identity] = self._new_name(path)
            self.tensors[name], self.found[name] = tensor, (path, value)
        self.leaves.append((name, value))
        return name

    def _new_name(self, path: tuple[str, ...]) -> str:
        keys = (key.replace("~", "~0").replace("/", "~1") for key in path)
        # Other safetensors readers reject lone surrogates, and reserve METADATA. A number makes names unique: a dict
        # may have both 1 and "1" as keys.
        base = "/".join(keys).encode("utf-8", "backslashreplace").decode() or "value"
        name, number = base, 1
        while name in self.tensors or name == METADATA:
            number += 1
            name = f"{base}~{number}"
        return name


def _are_fields(fields: Any, count: int) -> bool:
    """Return whether `fields` are the field names of a named tuple with `count` items."""
    return (
        isinstance(fields, Sequence)
        and len(fields) == count
        and all(isinstance(field, str) and field.isidentifier() for field in fields)
    )


def _named_tuple(module: str, name: str, fields: list[str]) -> Callable[..., Any]:
    """Return the named tuple class if it is already imported and has these fields, else a new class like it."""
    found: Any = loaded(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == tuple(fields):
        # Do not call the class itself: a custom constructor may run any code.
        return lambda *items: tuple.__new__(found, items)
    return namedtuple(name.rpartition(".")[2], fields)


def _of_bytes(data: Chunk, place: int) -> Stored:
    return Stored("numpy", "U8", (len(data),), None, lambda: data, ("bytes", place, len(data)))


def _interned(text: str) -> str:
    """Return the interned string, as in source code: a pickle distinguishes equal strings from the same string."""
    return sys.intern(text) if text.isidentifier() else text


class _Restoring:
    def __init__(self, part: str, tensors: Tensors) -> None:
        self.part = f"part {part!r}"
        self.tensors = tensors
        self._made: dict[str, Any] = {}

    def read(self, written: Any) -> Any:
        """Rebuild the value of a JSON form."""
        if isinstance(written, list):
            return [self.read(item) for item in written]
        if isinstance(written, str):
            return _interned(written)
        if not isinstance(written, dict):
            return written
        if len(written) == 1:
            ((tag, content),) = written.items()
            if tag.startswith("$"):
                return self._tagged(tag, content)
        return {_interned(key): self.read(item) for key, item in written.items()}

    def _tagged(self, tag: str, content: Any) -> Any:
        match tag:
            case "$dict":
                return {self.read(key): self.read(item) for key, item in content}
            case "$set" | "$frozenset":
                return (set if tag == "$set" else frozenset)(self.read(item) for item in content)
            case "$deque":
                items, most = content
                return deque(map(self.read, items), most)
            case "$counter":
                return Counter({self.read(key): self.read(item) for key, item in content})
            case "$tuple":
                return tuple(self.read(item) for item in content)
            case "$namedtuple":
                module, name, fields, items = content
                return _named_tuple(module, name, fields)(*(self.read(item) for item in items))
            case "$state_dict":
                entries, metadata = content
                state: OrderedDict[Any, Any] = OrderedDict(self.read(entries))
                state._metadata = OrderedDict(self.read(metadata))  # type: ignore[attr-defined]
                return state
            case "$float":
                return float(content)
            case "$int":
                return int(content, 16)
            case "$complex":
                return complex(*(self.read(item) for item in content))
            case "$scalar":
                name, text = content
                if name not in NUMPY_TYPES:
                    raise CorruptCheckpointError(f"numpy scalars of type {name!r} need a newer version of mizzen")
                dtype = numpy_type(name, self.part).newbyteorder("<")
                array = library_of("numpy", self.part).frombuffer(bytes.fromhex(text), dtype)
                return array.astype(dtype.newbyteorder("="))[0]
            case "$bytes":
                return self._once(content, lambda: bytes(self.tensors[content][2]))
            case "$numpy" | "$torch":
                name, was, *order = (content, None) if isinstance(content, str) else content
                dtype, shape, data = self.tensors[name]
                return self._once(name, lambda: rebuilt(_LIBRARIES[tag], dtype, shape, was, data, self.part, *order))
        raise CorruptCheckpointError(f"the tree has the tag {tag!r}, which needs a newer version of mizzen")

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]
