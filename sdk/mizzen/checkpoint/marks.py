"""Marks of values: the mark of a value differs after each change in place."""

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from mizzen.checkpoint import rng
from mizzen.checkpoint.tensors import loaded

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Types whose values cannot change in place."""
MOST_BYTES = 64 << 20
"""Larger arrays are not saved."""
_MOST_ITEMS = 20_000
"""Longer lists and dicts are not saved, except lists of numbers and texts, such as losses."""
_MOST_ATOMS = 200_000
_WORDS = 1 << 17
"""Of a tensor with more words of 8 bytes, some of them are compared, if nothing else says that it has changed."""
_SAMPLES = 1 << 14
_LEAVES = 1_000
"""Of longer lists and dicts with arrays or containers in them, only the first and the last items are compared."""


class Large(NamedTuple):
    """The mark of a value that is too large to be saved."""

    mark: Any
    """Differs after most changes."""


class Unchanging(NamedTuple):
    """The mark of a value that cannot change in place, but is no number or text."""

    mark: Any


def is_atom(value: Any) -> bool:
    """Return whether a value cannot change in place."""
    kind = type(value)
    return kind in ATOMS or (kind is tuple and all(type(one) in ATOMS for one in value))


def marked(value: Any, is_saved: Callable[[Any], bool] = lambda _: False) -> Any:
    """Return a mark of a value that can change in place; None for others, and if it cannot be stored.

    `is_saved`: whether the content of a tensor is saved elsewhere, so that only another tensor is a change.
    """
    if is_atom(value):
        return None
    try:
        access = rng.generator(value)
        if access is None:
            return _mark(value, is_saved)
        state = access[0]()
        return state.numpy().tobytes() if hasattr(state, "numpy") else _mark(state, is_saved)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError):  # For example, a sparse tensor.
        return None


def _mark(value: Any, is_saved: Callable[[Any], bool]) -> Any:
    """Return a value that differs after each change of `value`; see `Large` and `_WORDS` for exceptions.

    Raises:
        TypeError: it has an object that cannot be stored.
    """
    if type(value) in ATOMS:
        return type(value), value
    torch, numpy = loaded("torch"), loaded("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_quantized:
            raise TypeError  # Its bytes cannot be viewed: the process would end.
        if is_saved(value):
            return _Same(value)
        # The version does not count changes of `tensor.data`.
        return _Same(value), 0 if value.is_inference() else value._version, *_sums(torch, value)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.hasobject:
            raise TypeError
        if value.nbytes > MOST_BYTES:
            some = value.reshape(-1)[:: value.size // _SAMPLES] if value.flags.c_contiguous else value[:1]
            return Large((value.shape, str(value.dtype), zlib.crc32(numpy.ascontiguousarray(some).view("uint8"))))
        return value.shape, str(value.dtype), zlib.crc32(numpy.ascontiguousarray(value).reshape(-1).view("uint8"))
    if isinstance(value, dict | list | deque | set) and len(value) > _MOST_ITEMS:
        is_short = isinstance(value, list | deque) and len(value) <= _MOST_ATOMS
        if not (is_short and ATOMS.issuperset(map(type, value))):
            return Large((type(value), id(value), len(value)))
    if isinstance(value, dict):
        return type(value), [*value], _mark([*value.values()], is_saved)
    if isinstance(value, set | frozenset):
        return type(value), len(value), sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        items = [*value]
        kinds = [*map(type, items)]
        if ATOMS.issuperset(kinds):
            return type(value), kinds, items
        return type(value), len(items), [_mark(one, is_saved) for one in _ends(items)]
    raise TypeError


def _sums(torch: Any, tensor: Any) -> list[int]:
    """Return sums of the bits of a tensor, which differ after most changes."""
    tensor = tensor.detach()
    if tensor.nbytes > 8 * _WORDS and not tensor.is_contiguous():  # A copy of an expanded tensor may be very large.
        tensor = tensor.take(torch.arange(0, tensor.numel(), tensor.numel() // _SAMPLES, device=tensor.device))
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    whole = len(flat) // 8 * 8
    words = flat[:whole].view(torch.int64)
    words = words if len(words) <= _WORDS else words[:: len(words) // _SAMPLES]
    found = torch.stack([one.sum(dtype=torch.int64) for one in (words, words[::2], words[::3], flat[whole:])])
    return [*found.tolist()]


def _ends(items: list[Any]) -> list[Any]:
    return items if len(items) <= 2 * _LEAVES else [*items[:_LEAVES], *items[-_LEAVES:]]


class _Same:
    """Equal to another one if both hold the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]
