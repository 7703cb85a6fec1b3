"""Compares two states bit by bit, and reports the paths of the entries that differ."""

import math
import pickle
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mizzen.checkpoint.parts import Pickled
from mizzen.checkpoint.tensors import Stored, loaded, stored


@dataclass(frozen=True)
class Difference:
    """One entry that differs between two states."""

    path: str
    """Path of the entry, beginning with the part, such as `optimizer/state/0/exp_avg`."""
    how: str
    """How the two values differ, in words."""


def between(left: Any, right: Any, path: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Yield the entries that differ, in the order of `left`. Floats and arrays are compared bitwise: nan equals nan."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key, value in left.items():
            if key in right:
                yield from between(value, right[key], (*path, str(key)))
            else:
                yield _differs((*path, str(key)), "it is missing after the restore")
        for key in right:
            if key not in left:
                yield _differs((*path, str(key)), "it exists only after the restore")
    elif isinstance(left, list | tuple | deque) and isinstance(right, tuple if isinstance(left, tuple) else type(left)):
        if len(left) != len(right):
            yield _differs(path, f"it has {len(right)} items instead of {len(left)}")
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            yield from between(one, other, (*path, str(index)))
    elif how := _how(left, right, "/".join(path)):
        yield _differs(path, how)


def _differs(path: tuple[str, ...], how: str) -> Difference:
    return Difference("/".join(path), how)


def _how(left: Any, right: Any, where: str) -> str | None:
    """Describe how two values that are not containers differ; None if they are equal."""
    one, other = stored(where, left), stored(where, right)
    if one is not None and other is not None:
        return _of_tensors(left, right, one, other)
    if isinstance(left, Pickled) and isinstance(right, Pickled):
        return None if pickle.dumps(left.value) == pickle.dumps(right.value) else "its pickle differs"
    if isinstance(left, Path) and isinstance(right, Path):
        return None if left.read_bytes() == right.read_bytes() else "the content of the file differs"
    if isinstance(left, bytes | bytearray | memoryview) and isinstance(right, bytes | bytearray | memoryview):
        return None if bytes(left) == bytes(right) else "its bytes differ"
    if isinstance(left, float) and isinstance(right, float):
        if _bits(left) == _bits(right):
            return None
        return f"{right!r} instead of {left!r}, a difference of {abs(right - left):.3g}"
    if isinstance(left, complex) and isinstance(right, complex):
        same = [_bits(left.real), _bits(left.imag)] == [_bits(right.real), _bits(right.imag)]
        return None if same else f"{right!r} instead of {left!r}, a difference of {abs(right - left):.3g}"
    if isinstance(left, bool) == isinstance(right, bool) and bool(left == right):
        return None
    if isinstance(left, int) and isinstance(right, int):
        return f"{_short(right)} instead of {_short(left)}, a difference of {_short(abs(right - left))}"
    return f"{_short(right)} instead of {_short(left)}"


def _of_tensors(left: Any, right: Any, one: Stored, other: Stored) -> str | None:
    if (one.library, one.dtype, one.was, one.shape) != (other.library, other.dtype, other.was, other.shape):
        return f"{_shape(right)} instead of {_shape(left)}"
    if memoryview(one.read()).cast("B") == memoryview(other.read()).cast("B"):
        return None
    how = "the bits of its elements differ"
    # Some types cannot be subtracted; the message then gives no amount.
    with suppress(Exception):
        changed, most = _amount(left, right, one.library)
        if changed:
            how = f"{changed:,} of {math.prod(left.shape):,} elements differ, by {most:.3g} at most"
    return how


def _amount(left: Any, right: Any, library: str) -> tuple[int, float]:
    """Return how many elements differ, and the greatest absolute difference."""
    if library == "numpy":
        numpy = loaded("numpy")
        kind = complex if left.dtype.kind == "c" else float
        apart = numpy.abs(left.astype(kind) - right.astype(kind))
        return int((left != right).sum()), float(numpy.nanmax(apart))
    torch = loaded("torch")
    one, other = left.detach().cpu(), right.detach().cpu()
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    return int((one != other).sum()), float((one - other).abs().nan_to_num().max())


def _shape(value: Any) -> str:
    return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)}"


def _bits(number: float) -> bytes:
    return struct.pack("<d", number)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
