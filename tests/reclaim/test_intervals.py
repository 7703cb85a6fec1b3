"""Equation 9, the final checkpoint and the offsets, for single jobs and for whole sites."""

from math import inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.intervals import (
    IntervalReason,
    P1Settings,
    SiteJobs,
    intervals,
    phases,
    tick,
)
from research.reclaim.starts import final_feasible, next_start_s
from tests.reclaim.reference import iterated, least, rate_of_cost

HAZARD = st.floats(-4, 2).map(lambda x: 10**x)
BYTES = st.floats(6, 11).map(lambda x: 10**x)
SPEED = st.floats(5, 10).map(lambda x: 10**x)
SECONDS = st.floats(0, 5).map(lambda x: 10**x)


@given(HAZARD, BYTES, SPEED, SECONDS, st.floats(0.05, 1))
def test_equation_9_is_the_numeric_minimum_within_its_limits(
    hazard: float, size: float, speed: float, loss_s: float, share: float
) -> None:
    """No interval between the two limits costs less; if the limits exclude each other, the lower one is taken."""
    found, _, reason = intervals(np.array([hazard]), size, speed, loss_s, share)
    low, high = size / (share * speed), 2 * loss_s
    if low > high:
        assert reason[0] == IntervalReason.LOSS_BUDGET_UNREACHABLE and found[0] == pytest.approx(low, rel=1e-12)
        return
    best = least(lambda one: rate_of_cost(hazard, size, speed, one), low, high)
    price = rate_of_cost(hazard, size, speed, found[0])
    assert low * (1 - 1e-12) <= found[0] <= high * (1 + 1e-12)
    assert price == pytest.approx(rate_of_cost(hazard, size, speed, best), rel=1e-6)
    assert price <= rate_of_cost(hazard, size, speed, best) * (1 + 1e-9)


def test_each_reason() -> None:
    """3.6 GB, lambda 1 per hour: sqrt(2 C / (lambda b)) with each limit in turn."""
    hazard = np.array([1.0, 100.0, 0.01, 1.0, 1.0])
    found, _, reason = intervals(hazard, 3.6e9, [1e8, 1e8, 1e8, 1e6, 0.0], 1800.0)
    assert found == pytest.approx([sqrt(2 * 36 * 3600), 180.0, 3600.0, 18_000.0, inf])
    assert [IntervalReason(one).name.lower() for one in reason] == [
        "optimum",
        "network_share",
        "loss_budget",
        "loss_budget_unreachable",
        "no_bandwidth",
    ]


def test_a_node_that_never_leaves_is_saved_within_the_loss_budget() -> None:
    found, _, reason = intervals(np.zeros(1), 1e9, 1e8, 600.0)
    assert (found[0], reason[0]) == (1200.0, IntervalReason.LOSS_BUDGET)


@pytest.mark.parametrize(("notice_s", "feasible"), [(44.9, False), (45.0, True), (inf, True), (0.0, False)])
def test_a_final_checkpoint_needs_its_transfer_and_what_follows(notice_s: float, feasible: bool) -> None:
    """4 GB at 100 MB/s take 40 s, and the restart 5 s."""
    assert final_feasible(4e9, 1e8, 5.0, notice_s) == feasible


def test_a_tick_over_a_site() -> None:
    """Four jobs, one of which is capped. The budget is 300 MB/s."""
    jobs = SiteJobs(
        number=np.arange(4, dtype=np.uint64),
        hazard_per_h=np.array([1.0, 1.0, 1.0, 8.0]),
        checkpoint_bytes=np.array([1e9, 1e9, 1e9, 1e9]),
        cap_bytes_s=np.array([inf, inf, inf, 6e7]),
    )
    done = tick(jobs, 3e8)
    assert done.bandwidth_bytes_s == pytest.approx([8e7, 8e7, 8e7, 6e7])
    assert done.interval_s[0] == done.interval_s[2] == pytest.approx(sqrt(2 * 12.5 * 3600))
    assert len(set(done.offset_s)) == 4 and (done.offset_s < P1Settings().stagger_s).all()


def test_a_large_site_equals_its_jobs_one_by_one() -> None:
    """A tick over 50,000 jobs gives each job what the plain rounds and the formula give it."""
    draw = np.random.default_rng(5)
    size = 50_000
    jobs = SiteJobs(
        number=np.arange(size, dtype=np.uint64),
        hazard_per_h=10 ** draw.uniform(-3, 1, size),
        checkpoint_bytes=10 ** draw.uniform(8, 10.7, size),
        loss_budget_s=10 ** draw.uniform(2, 4, size),
        cap_bytes_s=10 ** draw.uniform(5, 9, size),
    )
    done = tick(jobs, 1e12)
    weight = np.cbrt(jobs.hazard_per_h) * np.cbrt(np.asarray(jobs.checkpoint_bytes))
    assert done.bandwidth_bytes_s == pytest.approx(iterated(list(weight), list(np.asarray(jobs.cap_bytes_s)), 1e12))
    for row in draw.integers(0, size, 50):
        hazard, payload = jobs.hazard_per_h[row] / 3600, np.asarray(jobs.checkpoint_bytes)[row]
        b = done.bandwidth_bytes_s[row]
        low, high = payload / (0.2 * b), 2 * np.asarray(jobs.loss_budget_s)[row]
        assert done.interval_s[row] == pytest.approx(max(low, min(high, sqrt(2 * payload / (hazard * b)))))


def test_one_job_and_no_job() -> None:
    assert tick(SiteJobs(np.array([3], np.uint64), np.ones(1), 1e9), 1e8).bandwidth_bytes_s == pytest.approx([1e8])
    assert len(tick(SiteJobs(np.zeros(0, np.uint64), np.zeros(0), np.zeros(0)), 1e8).interval_s) == 0


@given(st.integers(0, 2**63), st.integers(1, 300))
def test_phases_of_successive_jobs_are_far_apart(first: int, count: int) -> None:
    """Gaps on the circle, with any start: the least gap is at least 0.38 of the even one."""
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(first)
    found = phases(numbers)
    gaps = np.diff(np.append(np.sort(found), np.sort(found)[0] + 1))
    assert gaps.min() >= 0.38 / count
    assert list(phases(numbers[::2])) == list(found[::2])


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(60, 4000)), min_size=2, max_size=20),
    st.integers(0, 1000),
)
def test_checkpoints_do_not_start_together(jobs: list[tuple[float, float]], first: int) -> None:
    """Whenever two jobs saved last and whatever their intervals, their next starts differ by their offsets."""
    last, interval = (np.array(one) for one in zip(*jobs, strict=True))
    offset = phases(np.arange(len(jobs)) + first) * 30.0
    start = next_start_s(last, interval, offset, 30.0)
    assert (abs(start - last - interval) <= 15.0 + 1e-6).all()
    apart = abs(start[:, None] - start) % 30.0
    apart = np.minimum(apart, 30.0 - apart)[~np.eye(len(jobs), dtype=bool)]
    assert apart.min() >= 0.38 * 30.0 / len(jobs) - 1e-6


def test_short_and_infinite_intervals_are_not_moved() -> None:
    assert list(next_start_s([100.0, 100.0], [59.0, inf], [3.0, 3.0], 30.0)) == [159.0, inf]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_budget_s": 0.0}, "loss_budget_s: 0.0: must be above 0"),
        ({"hazard_per_h": np.array([np.inf])}, r"hazard_per_h\[0\]: inf: must be 0 or more and finite"),
    ],
)
def test_bad_columns_are_named(change: dict[str, object], words: str) -> None:
    given = {"number": np.array([1], np.uint64), "hazard_per_h": np.ones(1), "checkpoint_bytes": 1e9, **change}
    with pytest.raises(ValueError, match=words):
        tick(SiteJobs(**given), 1e8)  # type: ignore[arg-type]


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"write_share: 1.5: must be above 0 and at most 1"):
        P1Settings(write_share=1.5)
