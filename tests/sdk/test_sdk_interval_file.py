"""The file with the interval that a coordinator computed: real files, replaced while a run goes on."""

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.cadence import Cadence, mtbf
from mizzen.cadence.interval_file import MAX_BYTES, IntervalFile, SiteInterval, parse
from tests.sdk.scripts import run as run_script

LATER_S = 4e9
HOURLY = mtbf(gang_mtbf_s=3600)


class Clock:
    """Monotonic and wall time of a simulated run. The epoch is far from the zero of the monotonic clock."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return 1_767_225_600.0 + self.now_s


def put(path: Path, **body: object) -> None:
    """Replaces the file as an agent does."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"expires_at_s": LATER_S, **body}))
    new.replace(path)


def started(path: Path, clock: Clock, **arguments: float) -> Cadence:
    cadence = Cadence(HOURLY, clock=clock, interval_file=IntervalFile(path, clock, clock.wall), **arguments)
    cadence.begin(0)
    return cadence


def steps_until_save(cadence: Cadence, clock: Clock, first: int) -> int:
    """Runs steps of a second, and returns the number of steps until a save is due."""
    step = first
    while not cadence.should_save(step := step + 1):
        clock.now_s += 1.0
        assert step < first + 10_000
    return step - first


def test_the_interval_of_the_file_is_used_and_followed(tmp_path: Path) -> None:
    """The file appears, is replaced and is removed during the run. Each change counts within the next readings."""
    path, clock = tmp_path / "interval.json", Clock()
    cadence = started(path, clock)
    own_s = cadence.explain().interval_s
    assert cadence.explain().rule == "young"
    put(path, interval_s=40.0, hazard_per_h=2.0)
    assert 39 <= steps_until_save(cadence, clock, 0) <= 41
    choice = cadence.explain()
    assert (choice.rule, choice.interval_s, choice.mtbf.mtbf_s) == ("site", 40.0, 1800.0)
    assert "The coordinator of the site computed the interval: 40 s." in choice.sentences()
    cadence.saved(100, 1.0)
    put(path, interval_s=70.0)
    assert 69 <= steps_until_save(cadence, clock, 100) <= 71
    path.unlink()
    cadence.saved(300, 1.0)
    clock.now_s += 2
    cadence.should_save(301)
    assert cadence.explain().rule == "young" and cadence.explain().interval_s < own_s


def test_the_coordinator_limits_the_formula_on_both_sides(tmp_path: Path) -> None:
    """Intervals are never longer than the task's own, except to leave others their bandwidth; nor longer than told."""
    path, clock = tmp_path / "interval.json", Clock()
    own_s = (2 * 3600 * 10.0) ** 0.5

    def chosen(**limits: float) -> tuple[str, float]:
        put(path, hazard_per_h=0.01, **limits)
        choice = started(path, clock).explain()
        return choice.rule, choice.interval_s

    assert chosen(interval_s=5000.0) == ("young", pytest.approx(own_s))
    assert chosen(interval_s=5000.0, least_s=200.0) == ("young", pytest.approx(own_s))
    assert chosen(interval_s=200.0, least_s=100.0) == ("site", 200.0)
    assert chosen(interval_s=5000.0, least_s=400.0) == ("site", 400.0)


def test_an_own_interval_is_staggered_too(tmp_path: Path) -> None:
    """The coordinator only gives the offset; the interval is that of the formula."""
    path, clock = tmp_path / "interval.json", Clock()
    put(path, interval_s=5000.0, period_s=30.0, offset_s=11.0)
    cadence = started(path, clock)
    assert cadence.explain().rule == "young"
    step = 0
    while not cadence.should_save(step := step + 1):
        clock.now_s += 0.25
    past_s = (clock.wall() - 11.0) % 30.0
    assert min(past_s, 30.0 - past_s) < 0.6


def test_a_shorter_interval_counts_during_an_interval(tmp_path: Path) -> None:
    path, clock = tmp_path / "interval.json", Clock()
    put(path, interval_s=5000.0, least_s=5000.0)
    cadence = started(path, clock)
    for step in range(1, 201):
        clock.now_s += 1.0
        assert not cadence.should_save(step)
    put(path, interval_s=100.0)
    assert steps_until_save(cadence, clock, 200) <= 12


def test_an_expired_file_has_no_effect(tmp_path: Path) -> None:
    """The expiry is noticed although the file does not change."""
    path, clock = tmp_path / "interval.json", Clock()
    put(path, interval_s=5000.0, least_s=5000.0, expires_at_s=clock.wall() + 60)
    cadence = started(path, clock)
    assert cadence.explain().rule == "site"
    own = steps_until_save(cadence, clock, 0)
    assert cadence.explain().rule == "young" and own < 300


def test_a_fixed_interval_takes_precedence(tmp_path: Path) -> None:
    path, clock = tmp_path / "interval.json", Clock()
    put(path, interval_s=5000.0)
    cadence = started(path, clock, interval_s=33.0)
    assert (cadence.explain().rule, cadence.explain().interval_s) == ("told", 33.0)
    assert steps_until_save(cadence, clock, 0) <= 34


@pytest.mark.parametrize("begun_s", [0.0, 7.3, 29.9])
def test_saves_begin_at_the_offset_of_the_task(tmp_path: Path, begun_s: float) -> None:
    """Whenever the run began and however long saves take, saves begin 11 s after a multiple of 30 s."""
    path, clock = tmp_path / "interval.json", Clock()
    clock.now_s += begun_s
    put(path, interval_s=95.0, period_s=30.0, offset_s=11.0)
    cadence = started(path, clock)
    step, starts = 0, []
    while len(starts) < 4:
        clock.now_s += 0.25
        step += 1
        if cadence.should_save(step):
            starts.append(clock.wall())
            clock.now_s += 3.7
            cadence.saved(step, 3.7)
    assert all(abs((start - 11.0) % 30.0 - 30.0) < 0.6 or (start - 11.0) % 30.0 < 0.6 for start in starts)
    assert all(80 <= b - a <= 115 for a, b in pairwise(starts))


@given(st.floats(1, 5000), st.floats(1, 100), st.floats(0, 1), st.floats(1e9, 2e9))
def test_the_end_moves_by_at_most_half_a_period(interval_s: float, period_s: float, part: float, at_s: float) -> None:
    found = SiteInterval(interval_s, LATER_S, None, period_s, part * period_s).staggered_s(interval_s, at_s)
    assert abs(found - interval_s) <= period_s / 2 + 1e-5 and found > 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1]",
        b"[" * 3000,
        b'{"interval_s": 60}',
        b'{"interval_s": 0.5, "expires_at_s": 4e9}',
        b'{"interval_s": 86401, "expires_at_s": 4e9}',
        b'{"interval_s": 1e999, "expires_at_s": 4e9}',
        b'{"interval_s": NaN, "expires_at_s": 4e9}',
        b'{"interval_s": "60", "expires_at_s": 4e9}',
        b'{"interval_s": true, "expires_at_s": 4e9}',
        b'{"interval_s": 1%s, "expires_at_s": 4e9}' % (b"0" * 1000),
        b'{"interval_s": 60, "expires_at_s": Infinity}',
        b'\xff\xfe{"interval_s": 60}',
        b'{"interval_s": 60, "expires_at_s": 4e9, "x": "%s"}' % (b"y" * MAX_BYTES),
    ],
)
def test_an_invalid_file_has_no_effect(tmp_path: Path, text: bytes) -> None:
    path, clock = tmp_path / "interval.json", Clock()
    path.write_bytes(text)
    assert started(path, clock).explain().rule == "young"


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(text: bytes) -> None:
    found = parse(text)
    assert found is None or 1 <= found.interval_s <= 86_400


def test_optional_fields_that_are_invalid_are_left_out() -> None:
    text = b'{"interval_s": 60, "expires_at_s": 4e9, "hazard_per_h": -1, "period_s": 0, "offset_s": 3, "more": []}'
    assert parse(text) == SiteInterval(60.0, 4e9)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "loop"])
def test_what_is_not_a_file_has_no_effect(tmp_path: Path, kind: str) -> None:
    """A pipe without a writer does not block the training, and links are not followed."""
    path, clock = tmp_path / "interval.json", Clock()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        other = tmp_path / "other.json"
        put(other, interval_s=40.0)
        path.symlink_to(other if kind == "link" else path)
    assert started(path, clock).explain().rule == "young"


def test_the_status_is_read_once_a_second(tmp_path: Path) -> None:
    """A replaced file is not noticed before a second has passed, and then it is."""
    path, clock = tmp_path / "interval.json", Clock()
    put(path, interval_s=40.0)
    file = IntervalFile(path, clock, clock.wall)
    assert file.current() == SiteInterval(40.0, LATER_S)
    put(path, interval_s=50.0)
    clock.now_s += 0.9
    assert file.current() == SiteInterval(40.0, LATER_S)
    clock.now_s += 0.2
    assert file.current() == SiteInterval(50.0, LATER_S)


def test_a_checkpointer_reads_the_file_of_its_environment(tmp_path: Path) -> None:
    """In a real process the variable of the agent is enough."""
    path = tmp_path / "interval.json"
    put(path, interval_s=123.0, expires_at_s=time.time() + 600)
    script = f"""
from mizzen.checkpoint import Checkpointer
kept = Checkpointer({str(tmp_path / "root")!r})
choice = kept.cadence.explain()
print(choice.rule, choice.interval_s)
"""
    ended = run_script(script, MIZZEN_INTERVAL_FILE=str(path))
    assert ended.stdout.split() == ["site", "123.0"], ended.stderr
