"""Patterns of numbers, durations and sizes match exactly the texts whose value is within the bounds."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.patterns import decimals, durations, sizes, whole_numbers
from domain.units import parse_duration_s, parse_size_bytes
from tests.depth import examples

SEEDED = settings(max_examples=examples(500), derandomize=True, deadline=None, database=None)
_THOUSANDTHS = st.one_of(st.integers(0, 10**9), st.integers(0, 3000))


@SEEDED
@given(a=st.integers(0, 10**6), b=st.integers(0, 10**6), others=st.lists(st.integers(0, 2 * 10**6), max_size=20))
def test_whole_numbers(a: int, b: int, others: list[int]) -> None:
    """Numbers within the bounds match, and those next to the bounds do not."""
    low, high = sorted((a, b))
    pattern = re.compile(whole_numbers(low, high))
    for number in {low, high, low - 1, high + 1, 9, 10, 99, 100, *others} - {-1}:
        assert (pattern.fullmatch(str(number)) is not None) == (low <= number <= high)


@SEEDED
@given(a=_THOUSANDTHS, b=_THOUSANDTHS, others=st.lists(_THOUSANDTHS, max_size=20))
def test_decimal_numbers(a: int, b: int, others: list[int]) -> None:
    """Numbers with up to three decimal places match if they are within the bounds."""
    low, high = sorted((a, b))
    pattern = re.compile(str(decimals(Fraction(low, 1000), Fraction(high, 1000))))
    for number in {low, high, max(low - 1, 0), high + 1, *others}:
        whole, places = divmod(number, 1000)
        for text in {f"{whole}.{places:03}", f"{whole}.{places:03}".rstrip("0").removesuffix(".")}:
            assert (pattern.fullmatch(text) is not None) == (low <= number <= high)


@pytest.mark.parametrize(("low_s", "high_s"), [(0, 3600), (0.1, 31_622_400), (1, 86_400), (0.5, 3600)])
def test_durations(low_s: float, high_s: float) -> None:
    """A text matches if its value is within the bounds, also at the bounds in each unit."""
    pattern = re.compile(durations(low_s, high_s))
    numbers = ["0", "0.001", "0.042", "0.1", "0.5", "1", "1.5", "23", "59", "60", "99", "100", "366", "999.999", "3600",
               "8784", "86400", "31622400", "31622400000"]  # fmt: skip
    for text in [f"{number}{unit}" for number in numbers for unit in ("ms", "s", "m", "h", "d")]:
        assert (pattern.fullmatch(text) is not None) == (low_s <= parse_duration_s(text) <= high_s), text
    for text in ("1m30s", "59m59s999ms", "23h59m", "365d23h59m59s999ms"):
        assert (pattern.fullmatch(text) is not None) == (parse_duration_s(text) <= high_s), text
    for text in ("366d1ms", "30s1m", "1m60s", "1m1m", "0h1m", "01s", "1.0000s", "1.5m1s", "1m1.5s", "", "1", "1 s"):
        assert pattern.fullmatch(text) is None, text


def test_sizes() -> None:
    """A text matches if its value is within the bounds, also at the bounds in each unit."""
    low, high = 1 << 20, 1 << 46
    pattern = re.compile(sizes(low, high))
    numbers = ["0", "0.001", "0.5", "1", "1.5", "64", "64.001", "65", "65536", "1023", "1024", "1048.575", "1048.576",
               "70.368", "70.369", "70368744177.664", "70368744177.665", "67108864", "67108865"]  # fmt: skip
    units = [f"{letter}{kind}" for letter in "KMGT" for kind in ("", "B", "i", "iB")]
    for text in [f"{number}{space}{unit}" for number in numbers for unit in units for space in ("", " ")]:
        assert (pattern.fullmatch(text) is not None) == (low <= parse_size_bytes(text) <= high), text
    for text in ("1048576", "70368744177664", "1048576B"):
        assert pattern.fullmatch(text), text
    for text in ("1048575", "70368744177665", "1MIB", "1  MiB", " 1MiB", "01MiB", "1.0000MiB", "1iB", "MiB", "-1MiB"):
        assert pattern.fullmatch(text) is None, text
