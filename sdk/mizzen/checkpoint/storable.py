"""Which of the attributes that a training changes are stored: those of types that can be, and not too large."""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mizzen.checkpoint import trees
from mizzen.checkpoint.attribute_holders import DATA, TENSORS
from mizzen.checkpoint.descriptions import Description
from mizzen.checkpoint.errors import StateError
from mizzen.checkpoint.known_modules import is_module, saved_tensors
from mizzen.checkpoint.marks import ATOMS, MOST_BYTES
from mizzen.checkpoint.refill import storage
from mizzen.checkpoint.tensors import loaded

ByPath = dict[str, dict[str, Any]]


@dataclass
class Found:
    """What has changed, by path and name."""

    values: ByPath = field(default_factory=dict)
    """Values, or descriptions of those in `made`."""
    made: ByPath = field(default_factory=dict)
    generators: ByPath = field(default_factory=dict)
    large: list[str] = field(default_factory=list)
    lost: dict[str, Any] = field(default_factory=dict)
    """Objects that cannot be made again."""

    def add(self, path: str, name: str, value: Any, description: Description | None) -> None:
        """Add a value that may have a description."""
        self.values.setdefault(path, {})[name] = value if description is None else description.tree
        if description is not None:
            self.made.setdefault(path, {})[name] = value


def storable(values: ByPath, objects: Mapping[str, Any]) -> tuple[ByPath, list[str]]:
    """Return the values that can be stored and do not share memory with the tracked `objects`.

    Also returns the paths of the values that are too large. Two kinds of large values are left out: attributes of
    datasets and collators, which may be caches, and tensors with a graph for a backward pass.
    """
    owned: set[int] | None = None
    sizes: list[tuple[int, str, str]] = []
    for path, found in values.items():
        for name, value in found.items():
            with suppress(StateError, RuntimeError):
                leaves = [one for _, one in trees.flatten(path, value).leaves] if type(value) not in ATOMS else []
                tensors = [one for one in leaves if hasattr(one, "untyped_storage")]
                if tensors and owned is None:
                    owned = _owned(objects)
                if not any(storage(one) in owned for one in tensors if owned):
                    sizes.append((0 if name in TENSORS else sum(map(_size_bytes, leaves)), path, name))
    kept: ByPath = {}
    large: list[str] = []
    left = MOST_BYTES
    for size_bytes, path, name in sorted(sizes):
        left -= size_bytes
        if left >= 0 or not size_bytes:
            kept.setdefault(path, {})[name] = values[path][name]
        elif not (
            _has_graph(values[path][name]) or any(path.startswith(part) for part in objects if part.endswith(DATA))
        ):
            large.append(f"{path}.{name}")
    return kept, large


def _size_bytes(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, bytes | bytearray) else int(leaf.nbytes)


def _owned(objects: Mapping[str, Any]) -> set[int]:
    """Return the memory of the tensors that the `state_dict` of a tracked module has."""
    every = (tensor for one in objects.values() if is_module(one) for tensor in saved_tensors(one))
    return {storage(tensor) for tensor in every} - {0}


def moved(new: Any, old: Any, device: Any) -> Any:
    """Return a value with its tensors on the device of `old`, else on `device`; None: where they are.

    Dicts are changed in place.
    """
    torch = loaded("torch")
    if torch is not None and isinstance(new, torch.Tensor):
        device = old.device if isinstance(old, torch.Tensor) else device
        return new if device is None else new.to(device)
    if isinstance(new, dict):
        before = old if isinstance(old, dict) else {}
        for key, one in new.items():  # Not `update`, with which a Counter would add.
            new[key] = moved(one, before.get(key), device)
        return new
    if isinstance(new, list | tuple | deque):
        items = [moved(one, None, device) for one in new]
        if isinstance(new, tuple):
            return tuple.__new__(type(new), items)
        return items if isinstance(new, list) else deque(items, new.maxlen)
    return new


def devices(value: Any) -> set[Any]:
    """Return the devices of the tensors in a value."""
    if hasattr(value, "untyped_storage"):
        return {value.device}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | deque) else ()
    return set[Any]().union(*map(devices, items))


def _has_graph(value: Any) -> bool:
    """Return whether a tensor in a value is the result of a forward pass, through which gradients flow."""
    if hasattr(value, "untyped_storage"):
        return value.grad_fn is not None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | deque) else ()
    return any(map(_has_graph, items))
