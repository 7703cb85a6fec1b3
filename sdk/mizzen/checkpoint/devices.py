"""The devices of the tensors in a value, and whether these have a graph."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from mizzen.checkpoint.tensors import loaded


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


def has_graph(value: Any) -> bool:
    """Return whether a tensor in a value is the result of a forward pass, through which gradients flow."""
    if hasattr(value, "untyped_storage"):
        return value.grad_fn is not None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | deque) else ()
    return any(map(has_graph, items))
