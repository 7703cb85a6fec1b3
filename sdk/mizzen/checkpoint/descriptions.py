"""Describes values as trees that can be stored, also objects of a script's classes, and makes the values again.

Making an object calls no constructor: its class is looked up among the imported ones, and its attributes are set. Only
classes of the script, modules of torch, and a few types of Python, numpy and torch are made.

A description is a list. Its first item names the kind.
"""

import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

from mizzen.checkpoint import rng
from mizzen.checkpoint.marks import ATOMS
from mizzen.checkpoint.own_names import is_of_script
from mizzen.checkpoint.tensors import loaded

Tree: TypeAlias = list[Any]

_MOST_NODES = 5_000
"""Values with more objects inside are not described: that would take more than about 10 ms of a save."""
_ITEMS = (list, tuple, set, frozenset, deque)
_PLAIN: dict[str, Any] = {one.__name__: one for one in (*_ITEMS, dict, OrderedDict, defaultdict, Counter)}
_FACTORIES = {one.__name__: one for one in (int, float, str, bool, list, dict, set, tuple)}
"""Classes that a `defaultdict` calls."""
_NO_OBJECTS = (int, float, complex, str, bytes, BaseException, ModuleType)
"""Objects of classes that extend these are more than their attributes."""
_FRAMEWORKS = ("torch.", "lightning.", "pytorch_lightning.", "transformers.")
"""Objects of classes that extend theirs, such as datasets, samplers, optimizers and callbacks, are not made."""


class TooLargeError(Exception):
    """A value has too many objects inside to be described."""


class PartialError(TypeError):
    """A described object lacks attributes, and the script has not created it again."""


class Known:
    """The objects at the restore. Descriptions refer to them by path: each process has them."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.objects: dict[str, Any] = {}
        self._kinds: dict[tuple[str, str], type] = {}

    def add(self, pairs: Sequence[tuple[str, Any]]) -> None:
        """Add objects, with their paths."""
        values = [value for _, value in pairs]
        self.objects.update(pairs)
        self.paths.update(zip(map(id, values), [path for path, _ in pairs], strict=True))
        self.add_kinds(map(type, values))

    def add_kinds(self, kinds: Iterable[type]) -> None:
        """Add classes, which may be local to a function."""
        self._kinds |= {(kind.__module__, kind.__qualname__): kind for kind in set(kinds)}

    def named(self, module: str, name: str) -> Any:
        """Return a class or function of the script, of a module of torch, or of Python's own that may be made.

        Raises:
            TypeError: there is none of this name.
        """
        found: Any = self._kinds.get((module, name))
        if found is None and module == "builtins":
            found = _FACTORIES.get(name)
        elif found is None:
            found = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
        if not (isinstance(found, type | FunctionType) and (found.__module__, found.__qualname__) == (module, name)):
            raise TypeError(f"{module}.{name} is not a class or function of the script")
        if not _may_be_made(found):
            raise TypeError(f"{module}.{name} is of a library")
        return found


class Description:
    """The description of a value. An object that occurs twice in it is one object again."""

    def __init__(self, known: Known, value: Any) -> None:
        """Describe `value`.

        Raises:
            TypeError: it cannot be described.
            TooLargeError: it has too many objects inside.
        """
        self._known = known
        self._seen: dict[int, int] = {}
        self._values: list[Any] = []
        """The described objects. They stay referenced, so that no other object gets the `id` of one."""
        self._left = _MOST_NODES
        self.omitted: list[str] = []
        """Attributes of objects that cannot be described, with their types."""
        self.tree = self._of(value)

    def _of(self, value: Any) -> Tree:
        self._left -= 1
        if self._left < 0:
            raise TooLargeError
        if type(value) in ATOMS:
            return ["plain", value]
        if (path := self._known.paths.get(id(value))) is not None:
            return ["known", path]
        if (number := self._seen.get(id(value))) is not None:
            return ["same", number]
        self._seen[id(value)] = len(self._values)
        self._values.append(value)
        access = rng.generator(value)
        if access is not None:
            return ["generator", *_generator_kind(value), access[0]()]
        if isinstance(value, type | FunctionType):
            return ["name", *self._name(value)]
        if isinstance(value, Enum):
            return ["enum", *self._name(type(value)), value.name]
        return self._array(value) or self._small(value) or self._items(value) or self._object(value)

    def _name(self, kind: Any) -> tuple[str, str]:
        name = kind.__module__, kind.__qualname__
        if self._known.named(*name) is not kind:
            raise TypeError(f"{'.'.join(name)} is not the class of this name")
        return name

    def _array(self, value: Any) -> Tree | None:
        torch, numpy = loaded("torch"), loaded("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise TypeError("a tensor of a class of its own")
            kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
            return [kind, value, value.requires_grad and value.is_leaf]
        if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
            return None
        if isinstance(value, numpy.ndarray) and type(value) is not numpy.ndarray:
            raise TypeError("an array of a class of its own")
        if value.dtype.kind not in "USMmV" or value.dtype.hasobject:
            return ["plain", value]  # Types that cannot be stored are found later.
        if value.dtype.kind == "V" and value.dtype.names is None:
            return ["plain", value]
        shape = None if isinstance(value, numpy.generic) else value.shape
        return ["array", numpy.lib.format.dtype_to_descr(value.dtype), shape, value.tobytes()]

    def _small(self, value: Any) -> Tree | None:
        torch = loaded("torch")
        if torch is not None and isinstance(value, torch.dtype | torch.device):
            return ["torch", type(value).__name__, str(value).removeprefix("torch.")]
        if isinstance(value, pathlib.Path):
            return ["path", str(value)]
        if isinstance(value, bytearray):
            return ["bytearray", bytes(value)]
        return ["range", value.start, value.stop, value.step] if type(value) is range else None

    def _items(self, value: Any) -> Tree | None:
        kind = type(value)
        if isinstance(value, dict):
            name = self._items_kind(kind)
            factory = self._of(value.default_factory) if isinstance(value, defaultdict) else None
            pairs = [[self._of(key), self._of(one)] for key, one in value.items()]
            return ["dict", name, factory, pairs, self._content(value)]
        if not isinstance(value, _ITEMS):
            return None
        name = self._items_kind(kind)
        items = [self._of(one) for one in value]
        return ["items", name, items, getattr(value, "maxlen", None), self._content(value)]

    def _items_kind(self, kind: type) -> str | list[str]:
        return kind.__name__ if kind in (*_PLAIN.values(), _size()) else list(self._name(kind))

    def _content(self, value: Any) -> list[Any]:
        """Return the attributes of a list or dict of a class of the script."""
        return [[name, self._of(one)] for name, one in getattr(value, "__dict__", {}).items()]

    def _object(self, value: Any) -> Tree:
        if not is_made(value):
            raise TypeError(f"a {type(value).__qualname__}")
        name = self._name(type(value))
        state = value.__getstate__()
        parts = state if isinstance(state, tuple) else (state,)
        if not all(part is None or isinstance(part, dict) for part in parts):
            raise TypeError(f"{type(value).__qualname__} has a __getstate__ that returns no dict")
        content, is_whole = [], True
        usual = _new_module() if hasattr(value, "_modules") else {}
        for attribute, one in [pair for part in parts for pair in (part or {}).items()]:
            if attribute in usual and not (one or usual[attribute]) and type(one) is type(usual[attribute]):
                continue  # Most of the attributes of a module are empty dicts of hooks.
            number = len(self._values)
            try:
                content.append([attribute, self._of(one)])
            except TypeError:
                for later in islice(self._values, number, None):
                    self._seen.pop(id(later), None)
                del self._values[number:]
                self.omitted.append(f"{attribute} ({type(one).__qualname__})")
                is_whole = False
        return ["object", *name, is_whole, content]


class Making:
    """Makes one described value."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._made: list[Any] = []

    def value(self, tree: Tree, old: Any = None) -> Any:
        """Return the value. `old`: an object that is there now, and is filled if it has the same class.

        Raises:
            TypeError, ValueError, LookupError, AttributeError: the script has no such class any more, or the
                description is malformed.
        """
        tag, *content = tree
        if tag == "plain":
            return content[0]
        if tag == "known":
            return self._known.objects[content[0]]
        if tag == "same":
            return self._made[content[0]]
        place = len(self._made)
        self._made.append(None)
        made = self._made[place] = self._one(place, tag, content, old)
        return made

    def _one(self, place: int, tag: str, content: list[Any], old: Any) -> Any:
        match tag, content:
            case "tensor" | "parameter", [tensor, requires_grad]:
                if tag == "parameter":
                    return loaded("torch").nn.Parameter(tensor, requires_grad)
                return tensor.requires_grad_() if requires_grad else tensor
            case "array", [descr, shape, data]:
                numpy = loaded("numpy")
                array = numpy.frombuffer(bytearray(data), numpy.lib.format.descr_to_dtype(descr))
                return array[0] if shape is None else array.reshape(shape)
            case "generator", [kind, inner, state]:
                return _made_generator(kind, inner, state)
            case "name", [module, name]:
                return self._known.named(module, name)
            case "enum", [module, name, member]:
                kind = self._known.named(module, name)
                if not issubclass(kind, Enum):
                    raise TypeError(f"{module}.{name} is not an enumeration any more")
                return kind[member]
            case "torch", ["dtype" | "device" as kind, text]:
                torch = loaded("torch")
                found = getattr(torch, text) if kind == "dtype" else torch.device(text)
                if not isinstance(found, torch.dtype | torch.device):
                    raise TypeError(f"torch.{text} is not a type")
                return found
            case "path", [text]:
                return pathlib.Path(text)
            case "bytearray", [data]:
                return bytearray(data)
            case "range", [*limits]:
                return range(*limits)
            case "dict", [kind, factory, pairs, attributes]:
                return self._dict(place, self._kind(kind), factory, pairs, attributes)
            case "items", [kind, items, most, attributes]:
                return self._items(place, self._kind(kind), items, most, attributes)
            case "object", [module, name, is_whole, pairs]:
                return self._object(place, self._known.named(module, name), is_whole, pairs, old)
        raise ValueError(f"a description of kind {tag!r} needs a newer version of mizzen")

    def _kind(self, name: Any) -> Any:
        return self._known.named(*name) if isinstance(name, list) else {**_PLAIN, "Size": _size()}[name]

    def _dict(self, place: int, kind: Any, factory: Any, pairs: list[Any], attributes: list[Any]) -> Any:
        base: Any = next(one for one in (OrderedDict, defaultdict, dict) if issubclass(kind, one))
        made = self._made[place] = base.__new__(kind)
        if factory is not None:
            made.default_factory = self.value(factory)
        for key, one in pairs:
            base.__setitem__(made, self.value(key), self.value(one))
        return self._with(made, attributes)

    def _items(self, place: int, kind: Any, trees: list[Tree], most: int | None, attributes: list[Any]) -> Any:
        if kind is _size():
            return kind(map(self.value, trees))
        base: Any = next(one for one in _ITEMS if issubclass(kind, one))
        if base in (tuple, frozenset):
            return self._with(base.__new__(kind, [*map(self.value, trees)]), attributes)
        made = self._made[place] = base.__new__(kind)
        base.__init__(made, map(self.value, trees), *([most] if base is deque else []))
        return self._with(made, attributes)

    def _object(self, place: int, kind: Any, is_whole: bool, pairs: list[Any], old: Any) -> Any:
        is_there = type(old) is kind and id(old) not in self._known.paths
        if not (is_whole or is_there):
            raise PartialError(f"a new {kind.__qualname__} would lack attributes")
        made = self._made[place] = old if is_there else object.__new__(kind)
        if not is_there and issubclass(kind, getattr(loaded("torch.nn"), "Module", ())):
            vars(made).update(_new_module())
        if hasattr(kind, "__setstate__"):
            made.__setstate__({name: self.value(one) for name, one in pairs})
            return made
        return self._with(made, pairs)

    def _with(self, made: Any, attributes: list[Any]) -> Any:
        for name, one in attributes:
            object.__setattr__(made, name, self.value(one))  # A frozen dataclass has a `__setattr__` that fails.
        return made


def is_plain(value: Any) -> bool:
    """Return whether a value that can be stored is restored with the same types, without a description."""
    kind, torch, numpy = type(value), loaded("torch"), loaded("numpy")
    if kind in ATOMS:
        return True
    if torch is not None and isinstance(value, torch.Tensor):
        return kind is torch.Tensor and not (value.requires_grad and value.is_leaf)
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return value.dtype.kind in "biufc" or (value.dtype.kind == "V" and value.dtype.names is None)
    if kind in (dict, Counter) or (kind is OrderedDict and hasattr(value, "_metadata")):
        return _are_plain(value) and _are_plain(value.values())
    return (kind in _ITEMS or (isinstance(value, tuple) and hasattr(value, "_fields"))) and _are_plain(value)


def _are_plain(values: Any) -> bool:
    return ATOMS.issuperset(map(type, values)) or all(map(is_plain, values))


def is_made(value: Any) -> bool:
    """Return whether a value is a module, or an object of a class of the script that extends none of a framework."""
    torch, kind = loaded("torch"), type(value)
    if torch is not None and isinstance(value, torch.nn.Module):
        return not isinstance(value, torch.jit.ScriptModule)
    has_content = isinstance(getattr(value, "__dict__", None), dict) or hasattr(kind, "__slots__")
    if not has_content or isinstance(value, _NO_OBJECTS) or not is_of_script(kind):
        return False
    return not any(one.__module__.startswith(_FRAMEWORKS) for one in kind.__mro__)


def _may_be_made(found: Any) -> bool:
    torch = loaded("torch")
    if found in _FACTORIES.values() or is_of_script(found):
        return True
    if torch is None or not isinstance(found, type):
        return getattr(found, "__module__", None) == "torch.nn.functional"
    return issubclass(found, torch.nn.Module)


def _new_module() -> dict[str, Any]:
    """Return the attributes of a new module."""
    found: dict[str, Any] = vars(loaded("torch").nn.Module())
    return found


def _size() -> Any:
    return getattr(loaded("torch"), "Size", None)


def _generator_kind(value: Any) -> tuple[str, str]:
    """Return the names of a generator's class, and of the algorithm of numpy or the device of torch."""
    kind = type(value).__name__
    if kind not in ("Random", "RandomState", "Generator") or is_of_script(type(value)):
        raise TypeError(f"a generator of class {kind}")
    if kind != "Generator":
        return kind, ""
    bits = getattr(value, "bit_generator", None)
    return ("torch", str(value.device)) if bits is None else (kind, type(bits).__name__)


def _made_generator(kind: str, inner: str, state: Any) -> Any:
    if kind == "torch":
        made = loaded("torch").Generator(inner)
    elif kind == "Random":
        made = loaded("random").Random()
    else:
        numpy = loaded("numpy.random")
        bits: Any = getattr(numpy, inner or "MT19937")
        if not issubclass(bits, numpy.BitGenerator):
            raise TypeError(f"{inner} is not a generator of numpy")
        made = numpy.Generator(bits()) if inner else numpy.RandomState()
    access = rng.generator(made)
    assert access is not None
    access[1](state)
    return made
