"""The hours of the week in which an owner lends a machine."""

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from agent.lending.hours import LendingHours


def test_lending_hours() -> None:
    """A window may pass midnight and the end of the week; days are names and ranges."""
    hours = LendingHours.parse("20:00-08:00 mon-fri; 00:00-24:00 sat,sun")
    monday = datetime(2026, 3, 2)
    assert [hours.is_open(monday.replace(hour=hour)) for hour in (0, 7, 8, 19, 20, 23)] == [
        False, False, False, False, True, True,
    ]  # fmt: skip
    assert hours.closes_at(monday.replace(hour=21)) == datetime(2026, 3, 3, 8)
    assert hours.opens_at(monday.replace(hour=7, minute=30, second=5)) == monday.replace(hour=20)
    assert hours.opens_at(monday.replace(hour=21)) is None
    saturday = datetime(2026, 3, 7, 12)
    assert hours.is_open(saturday) and hours.closes_at(saturday) == datetime(2026, 3, 9)
    sunday = LendingHours.parse("22:00-06:00 sun")
    assert sunday.is_open(monday.replace(hour=5)) and not sunday.is_open(monday.replace(hour=6))
    assert sunday.closes_at(monday.replace(hour=5)) == monday.replace(hour=6)
    always = LendingHours.parse("00:00-24:00")
    assert always.is_open(monday) and always.closes_at(monday) is None
    for wrong in ("", "8:00", "25:00-26:00", "10:60-11:00", "10:00-11:00 mon-", "10:00-11:00 xyz", "10:00-11:00,mon"):
        with pytest.raises(ValueError, match=r"^hours: "):
            LendingHours.parse(wrong)


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock skips 2:00 to 3:00 on the last Sunday of March, and repeats it on the last Sunday of October."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _local(utc: str) -> datetime:
    return datetime.fromisoformat(f"{utc}+00:00").astimezone()


@pytest.mark.usefixtures("berlin")
def test_lending_hours_when_the_clock_skips_an_hour() -> None:
    """A window that begins or ends at a skipped time does so at the instant of the skip."""
    before, skip = _local("2026-03-29T00:40"), _local("2026-03-29T01:00")
    for end in ("2:00", "2:01", "2:30", "3:00"):
        assert LendingHours.parse(f"22:00-{end}").closes_at(before) == skip
        assert LendingHours.parse(f"{end}-5:00").opens_at(before) == skip
    assert LendingHours.parse("22:00-3:01").closes_at(before) == _local("2026-03-29T01:01")
    assert LendingHours.parse("22:00-1:59").closes_at(before) == _local("2026-03-29T00:59")
    assert not LendingHours.parse("22:00-2:30").is_open(skip)


@pytest.mark.usefixtures("berlin")
def test_lending_hours_when_the_clock_repeats_an_hour() -> None:
    """In the second pass the machine stays lent, or the owner's, as it was at the end of the first one."""
    first, second = _local("2026-10-25T00:10"), _local("2026-10-25T01:10")
    assert (first.hour, second.hour, first.minute) == (2, 2, second.minute)
    early, late = LendingHours.parse("22:00-2:40"), LendingHours.parse("2:20-6:00")
    assert (early.is_open(first), early.is_open(second)) == (True, False)
    assert early.closes_at(first) == _local("2026-10-25T00:40")
    assert early.opens_at(second) == _local("2026-10-25T21:00")
    assert (late.is_open(first), late.is_open(second)) == (False, True)
    assert late.opens_at(first) == _local("2026-10-25T00:20")
    assert late.closes_at(second) == _local("2026-10-25T05:00")
