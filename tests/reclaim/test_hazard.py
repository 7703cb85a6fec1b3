"""Estimates of hazards against plain counts and against sites whose hazards are known."""

import json
from dataclasses import replace

import numpy as np
import pytest

from reclaim.drift import DriftSettings
from reclaim.gamma import quantile
from reclaim.hazard import HazardModel, HazardSettings
from reclaim.hazard_state import HazardState
from reclaim.profile import ProfileSettings
from research.experiments.reclaim.campus import DAY_S, Site, campus

NEVER = 1e12
"""A weight so large that its part of the model stays at 1."""
LEVELS_ONLY = HazardSettings(
    recent_events=NEVER,
    dispersion_events=NEVER,
    profile=ProfileSettings(bin_events=NEVER, weekend_events=NEVER),
    drift=DriftSettings(threshold=NEVER),
)


def observed(site: Site, settings: HazardSettings, days: float, seed: int, step_s: float = 7200.0) -> HazardState:
    """The state after some days in which all nodes were lent."""
    model = HazardModel(settings)
    size = len(site.nodes)
    node, at_s = site.departures(np.random.default_rng(seed), 0.0, days * DAY_S)
    state = model.start(site.nodes, site.buildings, 0.0)
    until_s = 0.0
    while until_s < days * DAY_S:
        until_s += step_s
        state = model.observe(state, until_s, node, at_s, np.arange(size), np.zeros(size), np.full(size, np.inf))
    return state


def test_levels_equal_plain_counts_in_the_window() -> None:
    """Random intervals and departures of 40 days, counted in loops. The window has the last 14 days."""
    draw = np.random.default_rng(1)
    names, homes = [f"n{i}" for i in range(6)], ["a", "a", "b", "b", "b", "c"]
    lent = draw.integers(0, 6, 80)
    from_s = draw.uniform(-DAY_S, 39 * DAY_S, 80)
    to_s = from_s + draw.exponential(DAY_S, 80)
    gone = draw.integers(0, 6, 60)
    at_s = draw.uniform(0, 40 * DAY_S, 60)
    model = HazardModel(LEVELS_ONLY)
    state = model.observe(model.start(names, homes, 0.0), 40 * DAY_S, gone, at_s, lent, from_s, to_s)
    first = 26 * DAY_S
    events, hours = [0] * 6, [0.0] * 6
    for node, when in zip(gone, at_s, strict=True):
        events[node] += when > first
    for node, start, end in zip(lent, from_s, to_s, strict=True):
        hours[node] += max(0.0, min(end, 40 * DAY_S) - max(start, first)) / 3600
    site = (1 + sum(events)) / (1 / 0.1 + sum(hours))
    mean, upper = model.hazards(state, 40 * DAY_S)
    for node in range(6):
        peers = [i for i in range(6) if homes[i] == homes[node]]
        building = (8 + sum(events[i] for i in peers)) / (8 / site + sum(hours[i] for i in peers))
        shape, exposure = 4 + events[node], 4 / building + hours[node]
        assert mean[node] == pytest.approx(shape / exposure)
        assert upper[node] == pytest.approx(quantile(shape, 0.8) / exposure)


def test_hazards_of_a_campus_are_found() -> None:
    """After 28 days, over four sites: the rate, the peaks, and bounds that hold for about the stated share of nodes."""
    model = HazardModel()
    total, holds, peaks = np.zeros(2), [], []
    high = [23, 24, 25, 35, 36, 37, 38, 39]
    for seed in range(4):
        site = campus(np.random.default_rng(seed))
        state = observed(site, HazardSettings(), 28, seed=100 + seed)
        for hour in range(24):
            at_s = 28 * DAY_S + hour * 3600.0 + 60
            found = model.hazards(state, at_s)
            true = site.levels_per_h * site.factor(np.array(at_s))
            total += found.mean_per_h.sum(), true.sum()
            holds.append((found.upper_per_h >= true).mean())
        week = state.profile.week().reshape(7, 48)
        peaks.append(week[:, high].mean() / np.delete(week, high, axis=1).mean())
    assert 0.85 < total[0] / total[1] < 1.15
    assert 0.7 < np.mean(holds) < 0.9
    assert 2.2 < np.mean(peaks) < 7


def test_only_lent_time_is_exposure() -> None:
    """Of two nodes with as many departures, one was lent for a tenth of the time: it has ten times the hazard."""
    model = HazardModel(LEVELS_ONLY)
    days = np.arange(30) * DAY_S
    state = model.observe(
        model.start(["always", "rarely"], ["a", "b"], 0.0),
        30 * DAY_S,
        np.repeat([0, 1], 30),
        np.tile(days + 3600, 2),
        np.repeat([0, 1], 30),
        np.tile(days, 2),
        np.concatenate((days + DAY_S, days + 0.1 * DAY_S)),
    )
    always, rarely = model.hazards(state, 30 * DAY_S).mean_per_h
    assert always == pytest.approx(1 / 24, rel=0.15) and rarely == pytest.approx(10 / 24, rel=0.4)


def test_thin_data_is_pooled_over_the_building() -> None:
    """A new node in a busy building gets a higher hazard than a new node in a calm one."""
    names, homes = [f"n{i}" for i in range(20)], ["busy"] * 10 + ["calm"] * 10
    model = HazardModel()
    size = 18
    lent = np.array([i for i in range(20) if i not in (9, 19)])
    days = np.repeat(np.arange(10), 9)
    state = model.observe(
        model.start(names, homes, 0.0), 10 * DAY_S, np.tile(np.arange(9), 10), days * DAY_S + 40_000,
        lent, np.zeros(size), np.full(size, np.inf),
    )  # fmt: skip
    found = model.hazards(state, 10 * DAY_S + 7200).mean_per_h
    assert found[9] > 1.7 * found[19] and found[9] == pytest.approx(found[0], rel=0.5)


def test_recent_departures_raise_the_hazard_of_their_building_for_a_while() -> None:
    site = Site(np.full(20, 0.01), ["a"] * 10 + ["b"] * 10, peak=1.0)
    flat = HazardSettings(profile=ProfileSettings(bin_events=NEVER, weekend_events=NEVER))
    model = HazardModel(flat)
    state = observed(site, flat, 20, seed=3)
    lent = np.arange(20), np.zeros(20), np.full(20, np.inf)
    until_s = state.now_s + 600
    calm = model.observe(state, until_s, [], [], *lent)
    hit = model.observe(state, until_s, [0, 1, 2], [until_s - 300] * 3, *lent)
    for wait_s, own, other in ((0.0, (1.8, 5), (0.9, 1.1)), (12 * 3600.0, (0.95, 1.5), (0.9, 1.1))):
        ratio = model.hazards(hit, until_s + wait_s).mean_per_h / model.hazards(calm, until_s + wait_s).mean_per_h
        assert own[0] < ratio[5] < own[1] and other[0] < ratio[15] < other[1]


def test_expected_departures_are_the_integral_of_the_hazard() -> None:
    """Against a sum over fine steps, over a peak, over midnight and over more than a week, just after departures."""
    site = campus(np.random.default_rng(2), nodes=8, per_day=20)
    model = HazardModel()
    state = observed(site, HazardSettings(), 15, seed=2)
    at_s = state.now_s + 1234.0
    for horizon_s in (0.0, 100.0, 3 * 3600.0, 30 * 3600.0, 9 * DAY_S):
        steps = max(1, int(horizon_s // 300))
        times = at_s + (np.arange(steps) + 0.5) * horizon_s / steps
        plain = sum(model.hazards(state, float(t)).mean_per_h for t in times) * horizon_s / steps / 3600
        assert model.expected(state, at_s, horizon_s) == pytest.approx(plain, rel=5e-3, abs=1e-12)
    each = np.arange(8) * 3600.0
    alone = [model.expected(state, at_s, one)[i] for i, one in enumerate(each)]
    assert model.expected(state, at_s, each) == pytest.approx(alone)


@pytest.mark.parametrize(("step_s", "rel"), [(1800.0, 1e-9), (300.0, 0.02)])
def test_small_steps_give_what_large_steps_give(step_s: float, rel: float) -> None:
    """A step within a part of the day only refines the expected counts."""
    site = campus(np.random.default_rng(4), nodes=10)
    whole = observed(site, HazardSettings(), 5, seed=4, step_s=5 * DAY_S)
    parts = observed(site, HazardSettings(), 5, seed=4, step_s=step_s)
    model = HazardModel()
    for one, other in zip(model.hazards(whole, 5 * DAY_S), model.hazards(parts, 5 * DAY_S), strict=True):
        assert one == pytest.approx(other, rel=rel)


def test_a_stored_state_continues_as_before() -> None:
    """After JSON, and with the rest of the log, a state gives the same hazards as one that was never stored."""
    site = campus(np.random.default_rng(6), nodes=12, per_day=30)
    model = HazardModel()
    state = observed(site, HazardSettings(), 9, seed=6)
    stored = model.from_json(json.loads(json.dumps(state.to_json())))
    node, at_s = site.departures(np.random.default_rng(9), state.now_s, state.now_s + 3 * DAY_S)
    found = [
        model.observe(one, state.now_s + 3 * DAY_S, node, at_s, np.arange(12), np.zeros(12), np.full(12, 1e12))
        for one in (state, stored)
    ]
    first, second = (model.hazards(one, one.now_s).upper_per_h for one in found)
    assert first == pytest.approx(second, rel=1e-6)
    with pytest.raises(ValueError, match=r"events: has the shape \(2, 48\): must be \(2, 24\)"):
        HazardModel(HazardSettings(profile=ProfileSettings(bin_s=3600))).from_json(state.to_json())


def test_nodes_join_and_leave() -> None:
    site = campus(np.random.default_rng(8), nodes=8, per_day=20)
    model = HazardModel()
    state = observed(site, HazardSettings(), 6, seed=8)
    moved = state.with_nodes(["new", *reversed(site.nodes)], ["building-0", *reversed(site.buildings)])
    before, after = (model.hazards(one, one.now_s).mean_per_h for one in (state, moved))
    assert after[:0:-1] == pytest.approx(before)
    assert after[0] == pytest.approx(before[:2].mean(), rel=0.5)
    fewer = moved.with_nodes(["node-3"], ["building-1"])
    assert fewer.events.sum() == state.events[:, 3].sum() and fewer.building_names == ("building-1",)
    assert model.observe(fewer, fewer.now_s + 600.0).now_s == fewer.now_s + 600.0


@pytest.mark.parametrize("shift", [3.0, 1 / 3])
def test_a_change_is_noticed_and_followed(shift: float) -> None:
    """Eight days after the rate tripled or fell to a third, the estimate is nearer to it than without the detector."""
    site = Site(np.full(40, 10 / 24 / 40), ["a"] * 40, peak=1.0)
    draw = np.random.default_rng(5)
    old, new = site.departures(draw, 0, 20 * DAY_S), site.departures(draw, 20 * DAY_S, 28 * DAY_S, shift)
    node, at_s = (np.concatenate(both) for both in zip(old, new, strict=True))
    found = {}
    for name, threshold in (("detector", 5.0), ("none", NEVER)):
        settings = replace(HazardSettings(recent_events=NEVER), drift=DriftSettings(threshold=threshold))
        model = HazardModel(settings)
        state = model.observe(
            model.start(site.nodes, site.buildings, 0.0), 28 * DAY_S, node, at_s,
            np.arange(40), np.zeros(40), np.full(40, np.inf),
        )  # fmt: skip
        levels = np.mean([model.hazards(state, state.now_s + h * 3600.0).mean_per_h.sum() for h in range(24)])
        found[name] = abs(np.log(levels / (10 / 24 * shift)))
        assert (state.change is not None) == (name == "detector")
        if state.change is not None:
            assert abs(state.change.since_s - 20 * DAY_S) < 2 * DAY_S
    assert found["detector"] < 0.25 and found["detector"] < 0.6 * found["none"]


def test_nodes_that_leave_together_are_no_change_of_the_rate() -> None:
    """Rooms of ten nodes leave at once: the dispersion is about ten, and no change is reported in 60 days."""
    draw = np.random.default_rng(11)
    at_s = np.sort(draw.uniform(0, 60 * DAY_S, 120))
    room = draw.integers(0, 4, 120)
    gone = (room[:, None] * 10 + np.arange(10)).ravel()
    model = HazardModel()
    state = model.start([f"n{i}" for i in range(40)], [f"room{i // 10}" for i in range(40)], 0.0)
    changes = set()
    for day in range(60):
        state = model.observe(
            state, (day + 1) * DAY_S, gone, np.repeat(at_s, 10), np.arange(40), np.zeros(40), np.full(40, np.inf)
        )
        changes.add(state.change and state.change.since_s)
    assert 5 < model.dispersion(state) < 20 and len(changes) <= 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10.0, [2], [5.0]), "departed: 2: must be the number of a node, 0 to 1"),
        ((10.0, [0], []), r"departed_at_s: has the shape \(0,\): must be 1 times"),
        ((-1.0,), r"until_s: -1.0: must be 0.0 or later"),
    ],
)
def test_bad_observations_are_named(arguments: tuple[object, ...], words: str) -> None:
    model = HazardModel()
    with pytest.raises(ValueError, match=words):
        model.observe(model.start(["a", "b"], ["x", "x"], 0.0), *arguments)  # type: ignore[arg-type]


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="window_days: 0: must be 1 or more"):
        HazardSettings(window_days=0)
    with pytest.raises(ValueError, match=r"node_events: 0.0: must be above 0"):
        HazardSettings(node_events=0.0)
    with pytest.raises(ValueError, match=r"bin_s: 7000.0: must divide the 86400 seconds of a day"):
        ProfileSettings(bin_s=7000.0)
    with pytest.raises(ValueError, match="nodes: 'a' occurs twice"):
        HazardModel().start(["a", "a"], ["x", "x"], 0.0)
