"""Patterns of numbers within bounds, so that a JSON Schema states the bounds of quantities that are written as text.

The patterns use only syntax that all dialects of regular expressions share. Numbers have no leading zeros, and at most
three decimal places.
"""

import re
from collections.abc import Iterable
from fractions import Fraction
from math import ceil, floor
from typing import Any

_PLACES = 3
_SCALE: int = 10**_PLACES
_UNITS_S = {"d": Fraction(86400), "h": Fraction(3600), "m": Fraction(60), "s": Fraction(1), "ms": Fraction(1, 1000)}
_FURTHER = {"h": "(?:1?[0-9]|2[0-3])", "m": "[1-5]?[0-9]", "s": "[1-5]?[0-9]", "ms": "[0-9]{1,3}"}
"""The number before each unit that follows a larger unit, as in `1h30m`."""
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def matching(pattern: str, *never: str) -> dict[str, Any]:
    """Returns the JSON Schema of texts that match a pattern and none of `never`.

    The pattern begins with `^` and ends with `$`.
    """
    # In Python, `$` also matches before a line end at the end of the text.
    refused = "|".join(never if re.fullmatch(pattern, "a\n") else ("\\n", *never))
    schema: dict[str, Any] = {"type": "string", "pattern": pattern}
    return schema | ({"not": {"type": "string", "pattern": refused}} if refused else {})


def whole_numbers(low: int, high: int) -> str:
    """Returns a pattern of the whole numbers from `low` to `high`, at least 0."""
    found: list[str] = []
    full: list[int] = []
    while low <= high:
        digits = len(str(low))
        last = min(high, 10**digits - 1)
        if low == 10 ** (digits - 1) and last == 10**digits - 1:
            full.append(digits - 1)
        else:
            found += _of_equal_length(str(low), str(last))
        low = last + 1
    if full:
        found.append(f"[1-9]{_digits(full[0], full[-1])}")
    return _any(found)


def decimals(low: Fraction, high: Fraction) -> str | None:
    """Returns a pattern of the decimal numbers from `low` to `high`, at least 0; None: there are none."""
    first, last = ceil(low * _SCALE), floor(high * _SCALE)
    if first > last:
        return None
    (a, from_), (b, to) = divmod(first, _SCALE), divmod(last, _SCALE)
    if a == b:
        return f"{a}{_fraction(from_, to)}"
    found = []
    if from_ > 0:
        found.append(f"{a}{_fraction(from_, _SCALE - 1)}")
        a += 1
    if to < _SCALE - 1:
        found.append(f"{b}{_fraction(0, to)}")
        b -= 1
    if a <= b:
        found.append(whole_numbers(a, b) + _fraction(0, _SCALE - 1))
    return _any(found)


def durations(low_s: float, high_s: float) -> str:
    """Returns a pattern of the durations from `low_s` to `high_s` seconds, such as `90s`, `1.5h` and `1h30m`.

    Parts are in the order of their units, and each further part is below one of the unit before.

    Args:
        low_s: at most 1.
        high_s: a multiple of each unit that is not longer.
    """
    low, high = Fraction(str(low_s)), Fraction(str(high_s))
    found = [f"{number}{unit}" for unit, size in _UNITS_S.items() if (number := decimals(low / size, high / size))]
    units = list(_UNITS_S)
    for at, unit in enumerate(units[:-1]):
        if (most := int(high / _UNITS_S[unit])) > 1:  # With a further part, there is one less.
            further = "".join(f"(?:{_FURTHER[smaller]}{smaller})?" for smaller in units[at + 1 :])
            found.append(f"{whole_numbers(1, most - 1)}{unit}{further}")
    return _any(found)


def sizes(low_bytes: int, high_bytes: int) -> str:
    """Returns a pattern of the sizes from `low_bytes` to `high_bytes`, such as `512MiB`, `1.5Gi` and `16GB`."""
    found = [f"{whole_numbers(low_bytes, high_bytes)} ?B?"]
    for letter, power in _POWERS.items():
        for base, unit in ((1024, f"{letter}iB?"), (1000, f"{letter}B?")):
            if number := decimals(Fraction(low_bytes, base**power), Fraction(high_bytes, base**power)):
                found.append(f"{number} ?{unit}")
    return _any(found)


def in_any_case(words: Iterable[str]) -> str:
    """Returns a pattern of the words, in capitals, small letters or both."""
    return _any(["".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else f"[{c}]" for c in word) for word in words])


def _fraction(first: int, last: int) -> str:
    """Returns a pattern of the decimal places from `first` to `last`, which are numbers of thousandths."""
    if (first, last) in ((0, 0), (0, _SCALE - 1)):
        return rf"(?:\.{'[0-9]' if last else '0'}{{1,{_PLACES}}})?"
    found: list[str] = []
    for places in range(1, _PLACES + 1):
        unit = 10 ** (_PLACES - places)
        low, high = -(-first // unit), last // unit
        if low <= high:
            found += _of_equal_length(str(low).zfill(places), str(high).zfill(places))
    return f"(?:\\.{_any(found)}){'?' if first == 0 else ''}"


def _of_equal_length(low: str, high: str) -> list[str]:
    """Returns patterns of the numbers from `low` to `high`, which have equally many digits."""
    if not low:
        return [""]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _of_equal_length(low[1:], high[1:])]
    digits = len(low) - 1
    first, last = int(low[0]), int(high[0])
    found, ends = [], []
    if low[1:] != "0" * digits:
        found = [low[0] + rest for rest in _of_equal_length(low[1:], "9" * digits)]
        first += 1
    if high[1:] != "9" * digits:
        ends = [high[0] + rest for rest in _of_equal_length("0" * digits, high[1:])]
        last -= 1
    if first <= last:
        found.append((f"[{first}-{last}]" if first < last else str(first)) + _digits(digits, digits))
    return found + ends


def _digits(least: int, most: int) -> str:
    if least == most:
        return "" if most == 0 else "[0-9]" if most == 1 else f"[0-9]{{{most}}}"
    return f"[0-9]{{{least},{most}}}"


def _any(found: list[str]) -> str:
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
