"""Puts a loaded state into a live dict, so that references of the script to inner objects stay valid.

A script may keep its own reference to an inner object, such as the tensors of an average of the weights. Dicts,
lists, arrays and tensors that fit are therefore filled in place. An object of another type or shape is replaced; if
something else refers to the old one, a `CheckpointWarning` names its path. An array that the training has replaced by
one in another order of memory is replaced, too, if nothing else refers to it.
"""

import sys
import warnings
from collections import deque
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import ExitStack
from typing import Any

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import axes_in_memory, loaded

_CONTAINERS = (MutableMapping, MutableSequence, MutableSet, deque)


class Refill:
    """Fills the dicts of one restore. The changes can be undone until the end of `undo`."""

    def __init__(self, undo: ExitStack, modules: Mapping[str, Any]) -> None:
        """`modules`: the tracked objects; a tensor that shares memory with one of them is replaced, not filled."""
        self._undo = undo
        self._modules = modules
        self._taken: set[int] | None = None
        self._replaced: list[str] = []

    def fill(self, part: str, target: MutableMapping[Any, Any], content: Mapping[Any, Any]) -> None:
        """Make `target` equal to `content`."""
        self._mapping(target, content, part)

    def warn(self) -> None:
        """Warn of the replaced objects to which something else refers."""
        for path in self._replaced:
            message = f"{path}: replaced, because its type or shape has changed; other references to it keep old values"
            warnings.warn(message, CheckpointWarning, stacklevel=4)

    def _mapping(self, target: MutableMapping[Any, Any], content: Mapping[Any, Any], path: str) -> None:
        items = {
            key: self._item(target, key, new, f"{path}/{key}") if key in target else new for key, new in content.items()
        }
        self._replaced += [f"{path}/{key}" for key in items if key in target and _is_stale(target, key, items[key])]
        self._undo.callback(_set_content, target, dict(target))
        _set_content(target, items)

    def _sequence(self, target: Any, content: Any, path: str) -> None:
        old = len(target)
        items = [
            self._item(target, index, new, f"{path}/{index}") if index < old else new
            for index, new in enumerate(content)
        ]
        both = range(min(old, len(items)))
        self._replaced += [f"{path}/{index}" for index in both if _is_stale(target, index, items[index])]
        self._undo.callback(_set_sequence, target, list(target))
        _set_sequence(target, items)

    def _item(self, container: Any, key: Any, new: Any, path: str) -> Any:
        if _references(container, key) <= _ALONE and has_other_order(container[key], new):
            return new
        return self.filled(container[key], new, path)

    def filled(self, old: Any, new: Any, path: str) -> Any:
        """Return `old`, filled with `new`; or `new`, if it does not fit."""
        if isinstance(old, MutableMapping) and isinstance(new, Mapping):
            self._mapping(old, new, path)
            return old
        if (isinstance(old, list) and isinstance(new, list)) or (
            isinstance(old, deque) and isinstance(new, deque) and old.maxlen == new.maxlen
        ):
            self._sequence(old, new, path)
            return old
        if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
            items = [self.filled(one, two, f"{path}/{n}") for n, (one, two) in enumerate(zip(old, new, strict=True))]
            return (
                old if all(one is two for one, two in zip(items, old, strict=True)) else tuple.__new__(type(new), items)
            )
        return old if self._is_filled(old, new) else new

    def _is_filled(self, old: Any, new: Any) -> bool:
        """Fill an array, a tensor, a set or bytes in place; return False if it does not fit."""
        numpy, torch = loaded("numpy"), loaded("torch")
        if isinstance(old, bytearray) and isinstance(new, bytes):
            self._undo.callback(old.__setitem__, slice(None), bytes(old))
            old[:] = new
            return True
        if isinstance(old, set) and isinstance(new, set):
            self._undo.callback(_set_content, old, set(old))
            _set_content(old, new)
            return True
        if numpy is not None and type(old) is type(new) is numpy.ndarray:
            same = (old.shape, old.dtype.newbyteorder("=")) == (new.shape, new.dtype.newbyteorder("="))
            if same and old.flags.writeable:
                self._undo.callback(old.__setitem__, ..., old.copy())
                old[...] = new
                return True
        if torch is None or not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
            return False
        if (old.shape, old.dtype) != (new.shape, new.dtype) or self._is_taken(old):
            return False
        kept = old.detach().clone()
        try:
            _copy(old, new)
        except RuntimeError:  # For example, several elements share memory.
            return False
        self._undo.callback(_copy, old, kept)
        return True

    def _is_taken(self, tensor: Any) -> bool:
        """Return whether a tensor shares memory with a tracked module, which has its own part."""
        if self._taken is None:
            torch = loaded("torch")
            modules = [module for module in self._modules.values() if isinstance(module, torch.nn.Module)]
            owned = [one for module in modules for one in (*module.parameters(), *module.buffers())]
            self._taken = {storage(one) for one in owned} - {0}
        return storage(tensor) in self._taken


def storage(tensor: Any) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # It has no memory of its own, for example because it is sparse.
        return 0


def _copy(tensor: Any, kept: Any) -> None:
    with loaded("torch").no_grad():
        tensor.copy_(kept)


def has_other_order(old: Any, new: Any) -> bool:
    """Return whether two arrays of numpy of the same shape have their axes in another order in memory."""
    numpy = loaded("numpy")
    if numpy is None or not (type(old) is type(new) is numpy.ndarray) or old.shape != new.shape:
        return False
    return bool(axes_in_memory(old) != axes_in_memory(new))


def _set_content(target: Any, items: Any) -> None:
    target.clear()
    target.update(items)


def _set_sequence(target: Any, items: list[Any]) -> None:
    target.clear()
    target.extend(items)


def _is_stale(container: Any, key: Any, new: Any) -> bool:
    """Return whether the mutable object under `key` is replaced by `new` although something else refers to it."""
    return container[key] is not new and _is_mutable(container[key]) and _references(container, key) > _ALONE


def _is_mutable(value: Any) -> bool:
    numpy, torch = loaded("numpy"), loaded("torch")
    arrays = (numpy.ndarray,) if numpy is not None else ()
    return isinstance(value, (*_CONTAINERS, *arrays, *((torch.Tensor,) if torch is not None else ())))


def _references(container: Any, key: Any) -> int:
    """Return the number of references to an item."""
    return sys.getrefcount(container[key])


_ALONE = _references([object()], 0)
"""`_references` of an item to which only its container refers."""
