"""Types and checks of the arrays that the functions of this package take."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


def column(name: str, values: ArrayLike, size: int, *, positive: bool = False, infinite: bool = False) -> Floats:
    """Returns `values` as a column of `size` numbers. A single number is repeated.

    Args:
        name: the name of the column, for the error message.
        values: a number, or `size` numbers.
        size: the number of rows.
        positive: whether each number must be above 0; otherwise it must be 0 or more.
        infinite: whether a number may be infinite.

    Raises:
        ValueError: the size is wrong, or a number is out of its range. The message names the column, row and value.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.shape not in ((), (size,)):
        raise ValueError(f"{name}: has the shape {found.shape}: must be one number or {size} numbers")
    least = found > 0 if positive else found >= 0
    good = least if infinite else least & np.isfinite(found)
    if not good.all():
        row = int(np.argmin(good)) if found.shape else None
        bad = found if row is None else found[row]
        wanted = ("above 0" if positive else "0 or more") + ("" if infinite else " and finite")
        raise ValueError(f"{name}{'' if row is None else f'[{row}]'}: {bad}: must be {wanted}")
    return np.broadcast_to(found, (size,))


def number(name: str, value: float, *, positive: bool = False) -> float:
    """Returns `value` if it is finite and in its range, as in `column`.

    Raises:
        ValueError: it is not. The message names the number.
    """
    if not (value > 0 if positive else value >= 0) or not np.isfinite(value):
        raise ValueError(f"{name}: {value}: must be {'above 0' if positive else '0 or more'} and finite")
    return float(value)


def rows(values: Any) -> int:
    """Returns the number of rows of a column."""
    return int(np.asarray(values).shape[0])


def check_numbers(name: str, numbers: Ints, count: int) -> None:
    """Raises ValueError, with the name of the array, if an element is not from 0 to count - 1."""
    wrong = np.flatnonzero((numbers < 0) | (numbers >= count))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}]: {numbers[wrong[0]]}: must be from 0 to {count - 1}")
