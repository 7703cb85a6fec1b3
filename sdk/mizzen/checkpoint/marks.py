"""Marks of values: the mark of a value differs after each change in place."""

import zlib
from collections import deque
from typing import Any

from mizzen.checkpoint import rng
from mizzen.checkpoint.tensors import loaded

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Types whose values cannot change in place."""
MOST_BYTES = 64 << 20
"""Larger arrays have no mark."""
_MOST_ITEMS = 20_000
"""Longer lists and dicts have no mark."""
_LEAVES = 1_000
"""Of longer lists and dicts with arrays or containers in them, only the first and the last items are compared."""


def is_atom(value: Any) -> bool:
    """Return whether a value cannot change in place."""
    kind = type(value)
    return kind in ATOMS or (kind is tuple and all(type(one) in ATOMS for one in value))


def marked(value: Any) -> Any:
    """Return a mark of a value that can change in place; None for others, and if it cannot be stored."""
    if is_atom(value):
        return None
    try:
        access = rng.generator(value)
        if access is None:
            return _mark(value)
        state = access[0]()
        return state.numpy().tobytes() if hasattr(state, "numpy") else _mark(state)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError):  # For example, a sparse tensor.
        return None


def _mark(value: Any) -> Any:
    """Return a value that differs after each change of `value`.

    Raises:
        TypeError: it has an object that cannot be stored.
    """
    if type(value) in ATOMS:
        return type(value), value
    torch, numpy = loaded("torch"), loaded("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        # The version does not count changes of `tensor.data`.
        ends = [value.detach()[at].item() for at in ((0,) * value.dim(), (-1,) * value.dim())] if value.numel() else []
        return _Same(value), 0 if value.is_inference() else value._version, *map(repr, ends)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.hasobject or value.nbytes > MOST_BYTES:
            raise TypeError
        return value.shape, str(value.dtype), zlib.crc32(numpy.ascontiguousarray(value).reshape(-1).view("uint8"))
    if isinstance(value, dict | list | deque | set) and len(value) > _MOST_ITEMS:
        raise TypeError
    if isinstance(value, dict):
        return type(value), [*value], _mark([*value.values()])
    if isinstance(value, set | frozenset):
        return type(value), len(value), sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        items = [*value]
        kinds = [*map(type, items)]
        if ATOMS.issuperset(kinds):
            return type(value), kinds, items
        return type(value), len(items), [_mark(one) for one in _ends(items)]
    raise TypeError


def _ends(items: list[Any]) -> list[Any]:
    return items if len(items) <= 2 * _LEAVES else [*items[:_LEAVES], *items[-_LEAVES:]]


class _Same:
    """Equal to another one if both hold the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]
