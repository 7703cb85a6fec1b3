"""Finds the objects whose plain attributes are saved: tracked ones, and objects of the script's classes inside."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from mizzen.checkpoint import rng
from mizzen.checkpoint.known_modules import Named, is_module, named_modules
from mizzen.checkpoint.marks import ATOMS
from mizzen.checkpoint.own_names import hides, is_of_script
from mizzen.checkpoint.tensors import loaded

TENSORS = ("_parameters", "_buffers")
INNER = "_modules."
"""How the names of modules without parameters begin that the training has put into a tracked module."""
DATA = (".dataset", ".collate_fn")
"""How the names of parts end that are not tracked objects, but attributes of tracked loaders."""
_STATE = ("state_dict", "load_state_dict")
_ITEMS = 100
"""Lists and dicts with more items are not searched for objects."""
_DEPTH = 4
_NO_HOLDERS = (type, FunctionType, ModuleType, Enum, list, dict, tuple, deque)


class AttributeHolder(NamedTuple):
    """An object with attributes."""

    part: str
    path: str
    value: Any
    is_inside: bool = False
    """Whether it is not a tracked object, nor a module of one: no `state_dict` has its parameters and buffers."""

    def attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes that may be saved."""
        excluded, hidden = excluded_of(type(self.value)), hides(type(self.value))
        for name, value in list(vars(self.value).items()):
            if name not in excluded and not (hidden and hidden(name)):
                yield name, value

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return the parameters and buffers that no `state_dict` of a tracked object has, by the attribute."""
        if not is_module(self.value):
            return {}
        if self.is_inside:
            return {key: dict(vars(self.value)[key]) for key in TENSORS}
        hidden = sorted(self.value._non_persistent_buffers_set)
        found = {key: self.value._buffers[key] for key in hidden if self.value._buffers[key] is not None}
        return {"_buffers": found} if hidden else {}


def holders(
    objects: Mapping[str, Any], named: Mapping[str, Named], among: Mapping[str, Named]
) -> Iterator[AttributeHolder]:
    """Yield the tracked objects and those inside; of the modules in `named`, only those in `among`."""
    seen = {id(inner) for modules in named.values() for _, inner in modules}
    seen |= {id(one) for one in objects.values()}
    for part, one in objects.items():
        for path, value in among[part] if named[part] else [(part, one)]:
            holder = AttributeHolder(part, path, value)
            yield holder
            yield from _below(holder, seen, _DEPTH)


def _below(holder: AttributeHolder, seen: set[int], depth: int) -> Iterator[AttributeHolder]:
    for name, value in holder.attributes() if depth else ():
        for suffix, one in objects_in(value):
            path = f"{holder.path}.{name}{suffix}"
            for inside, inner in named_modules(one, path) or [(path, one)]:
                if id(inner) not in seen:
                    seen.add(id(inner))
                    below = AttributeHolder(holder.part, inside, inner, True)
                    yield below
                    yield from _below(below, seen, depth - 1)


def watched(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some objects whose attributes are saved.

    These are modules, optimizers, plain objects of the script, and what loaders take data from.
    """
    torch, found = loaded("torch"), {}
    for name, one in objects.items():
        if is_module(one) or (torch is not None and isinstance(one, torch.optim.Optimizer)) or is_plain_object(one):
            found[name] = one
            continue
        for suffix in DATA:
            data = getattr(one, suffix[1:], None)
            kind = type(data)
            is_known = is_of_script(kind) or kind.__module__ == "torch.utils.data.dataset"
            if is_known and not hasattr(data, "state_dict") and isinstance(getattr(data, "__dict__", None), dict):
                found[name + suffix] = data
    return found


def is_plain_object(value: Any) -> bool:
    """Return whether a value is an object of a class of the script that saves no state itself."""
    return _is_holder(value) and not any(hasattr(value, name) for name in _STATE)


def has_state(value: Any) -> bool:
    """Return whether a value saves and loads its state itself."""
    return all(callable(getattr(value, name, None)) for name in _STATE)


def objects_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules and the objects of the script in an attribute, each with a suffix for its path."""
    if _is_holder(value):
        yield "", value
    elif isinstance(value, list | tuple | dict) and len(value) <= _ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"[{key!r}]", one) for key, one in items if type(one) not in ATOMS and _is_holder(one))


def inside(value: Any) -> list[Any]:
    """Return the objects of the script in a value."""
    return [one for _, one in objects_in(value)]


def place_of(holder: Any, name: str) -> tuple[dict[str, Any] | None, str]:
    """Return the dict and the key of an attribute; None if the script now has a buffer or a module of this name."""
    content = vars(holder)
    if name.startswith(INNER):
        return content["_modules"], name.removeprefix(INNER)
    is_taken = is_module(holder) and any(name in content[kind] for kind in (*TENSORS, "_modules"))
    return None if is_taken else content, name


def is_dataset(value: Any) -> bool:
    """Return whether a value is a dataset of torch."""
    data = loaded("torch.utils.data.dataset")
    return data is not None and isinstance(value, data.Dataset)


def _is_holder(value: Any) -> bool:
    if is_module(value):
        return True
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, _NO_HOLDERS):
        return False
    return is_of_script(type(value)) and rng.generator(value) is None


def _excluded_of(kind: type) -> frozenset[str]:
    """Return the attributes that a library uses itself."""
    torch = loaded("torch")
    if torch is not None and issubclass(kind, torch.nn.Module):
        return frozenset(vars(torch.nn.Module()))
    if torch is not None and issubclass(kind, torch.optim.Optimizer):
        return frozenset({"defaults", "state", "param_groups"})
    return frozenset()


# With the types of plain functions: mypy takes a class of any kind for unhashable.
excluded_of: Callable[[type], frozenset[str]] = cache(_excluded_of)
