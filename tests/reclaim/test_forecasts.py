"""Forecasts for live jobs against plain arithmetic, and against the decision for single nodes."""

import numpy as np
import pytest

from reclaim.buildings import MACHINE_MBIT, NEAR_S, SITE_MBIT, Building, Departure, Migrations, Rate
from reclaim.destinations import RESTART_S, Leaving, Nodes
from reclaim.forecasts import Saving, gains_s, horizon_s, joint_score
from reclaim.joint import EARLY_HORIZON_S, Outlook, Policy, early_moves

C = 3.2e9
MBIT = 125_000.0
B = 20e6
"""The bandwidth for checkpoints, below that of every link, so that it is the same everywhere."""
CAMPUS = (
    Building("campus", "a", link_mbit=300.0, rate=Rate(0.6, 0.12)),
    Building("campus", "b", link_mbit=200.0, rate=Rate(0.01, 0.01)),
    Building("campus", "c", link_mbit=1000.0),
)
JOB = Departure("campus", "a", C, C / B, 48 * 3600.0, local_candidates=2)
SAVING = Saving(save_bytes=C, stall_s=4.0, loss_budget_s=1800.0, most_bytes_s=B)


def _pairs(emergencies: list[float]) -> list[tuple[float, float]]:
    """Returns departures without any notice."""
    return [(one, 0.0) for one in emergencies]


def _read_s(building: Building) -> float:
    assert building.link_mbit is not None
    return C / (min(building.link_mbit, MACHINE_MBIT, SITE_MBIT) * MBIT)


def _loss_s(departures: float, next_s: float, hours: float = 48.0) -> float:
    """The least expected loss: equation 9's interval, and what it costs."""
    interval_s = 3600.0
    if departures:
        best_s = (2 * SAVING.stall_s / (departures / (hours * 3600))) ** 0.5  # type: ignore[operator]
        interval_s = min(3600.0, max(best_s, C / (0.2 * B)))
    return departures * (interval_s / 2 + next_s) + hours * 3600 * SAVING.stall_s / interval_s  # type: ignore[operator]


def _next_s(at: int) -> float:
    """The mean time of a migration from a machine of a building, by the store of the site, to any other machine."""
    upload_s = C / (min(CAMPUS[at].link_mbit or 0.0, MACHINE_MBIT) * MBIT)
    others = [n for n in range(len(CAMPUS)) for _ in range(2)]
    others.remove(at)
    return upload_s + sum(_read_s(CAMPUS[n]) for n in others) / len(others) + RESTART_S


def test_the_joint_score_is_the_time_of_the_migration_and_the_loss_there() -> None:
    found = joint_score(CAMPUS, JOB, SAVING)
    departures = [8 * 0.6 + 40 * 0.12, 48 * 0.01, 0.0]
    for at, one in enumerate(found):
        migration_s = C / B + _read_s(CAMPUS[at]) + RESTART_S
        assert one.score_s == pytest.approx(migration_s + _loss_s(departures[at], _next_s(at)))
        assert not one.away


def test_a_gain_is_the_loss_that_is_avoided_less_the_cost_of_the_move() -> None:
    there = [9.6, 0.48, 0.0]
    found = gains_s(CAMPUS, JOB, SAVING, (9.6, 0.0), _pairs(there))
    assert found[0] == -np.inf, "as many departures"
    # The machine of the job writes with its measured speed, so its next migration takes longer than that of others.
    others = [n for n in range(3) for _ in range(2)]
    here_s = _loss_s(9.6, C / B + sum(_read_s(CAMPUS[n]) for n in others) / 6 + RESTART_S)
    there[0] = 0.2
    found = gains_s(CAMPUS, JOB, SAVING, (9.6, 0.0), _pairs(there))
    for at in (0, 1, 2):
        migration_s = C / B + _read_s(CAMPUS[at]) + RESTART_S
        cost_s = 2 * migration_s + 0.1 * (migration_s - RESTART_S)
        assert found[at] == pytest.approx(here_s - _loss_s(there[at], _next_s(at)) - cost_s)


@pytest.mark.parametrize(
    ("here", "there", "policy"),
    [(0.1, [0.1, 0.0, 0.0], Policy()), (9.6, [9.6, 9.6, 9.6], Policy()), (9.6, [9.6, 0.5, 0.5], Policy(margin=50.0))],
    ids=["rarely", "as often there", "a large margin"],
)
def test_no_move_pays(here: float, there: list[float], policy: Policy) -> None:
    assert not np.isfinite(gains_s(CAMPUS, JOB, SAVING, (here, 0.0), _pairs(there), policy)).any()


@pytest.mark.parametrize("seed", range(20))
def test_the_gains_are_those_of_single_nodes(seed: int) -> None:
    """`joint.early_moves` decides the same on the same network if no other machine of the building is better."""
    rng = np.random.default_rng(seed)
    buildings = tuple(
        Building("campus", name, store=f"file:///{name}" if rng.random() < 0.5 else None,
                 link_mbit=float(rng.uniform(50, 2000)))
        for name in "abcd"
    )  # fmt: skip
    job = Departure("campus", "a", float(rng.uniform(1e8, 2e10)), float(rng.uniform(5, 300)),
                    float(rng.uniform(2e5, 4e5)), 2)  # fmt: skip
    saving = Saving(job.checkpoint_bytes, 2.0, 900.0, float(rng.uniform(1e7, 1e8)))
    here = float(rng.uniform(0, 20)), float(rng.uniform(0, 20))
    there = [here, *zip(rng.uniform(0, 20, 3).tolist(), rng.uniform(0, 20, 3).tolist(), strict=True)]
    migrations = Migrations.of(buildings, job)
    count = migrations.network.topology.nodes
    outlook = Outlook.of(
        1, count, horizon_s=horizon_s(job.remaining_s), emergencies=[here[0], *np.repeat([one for one, _ in there], 2)],
        notices=[here[1], *np.repeat([one for _, one in there], 2)],
        write_bytes_s=np.minimum(migrations.write_bytes_s, saving.most_bytes_s), loss_budget_s=900.0, stall_s=2.0,
    )  # fmt: skip
    jobs = Leaving.of([0], checkpoint_bytes=job.checkpoint_bytes, memory_bytes=1.0)
    nodes = Nodes.of(count, memory_bytes=1.0, capability=1.0, load=0.0)
    single = early_moves(migrations.network, nodes, jobs, outlook, np.full((1, 4), -np.inf), 0.0)
    found = gains_s(buildings, job, saving, here, there)
    best = float(found.max())
    assert single.gain_s[0] == pytest.approx(best if np.isfinite(best) else 0.0)
    if np.isfinite(best):
        assert (single.destination[0] - 1) // 2 == int(found.argmax())


def test_only_what_a_save_writes_takes_time_to_save() -> None:
    """A save of a tenth of the checkpoint can be more frequent; a migration reads all of it."""
    small = Saving(C / 10, 4.0, 1800.0, B)
    found, whole = (joint_score(CAMPUS, JOB, saving)[0].score_s for saving in (small, SAVING))
    interval_s = (2 * 4.0 / (9.6 / (48 * 3600))) ** 0.5
    loss_s = 9.6 * (interval_s / 2 + _next_s(0)) + 48 * 3600 * 4.0 / interval_s
    assert found == pytest.approx(C / B + _read_s(CAMPUS[0]) + RESTART_S + loss_s)
    assert found != pytest.approx(whole)


def test_no_more_than_the_horizon_is_lost() -> None:
    """However often owners come: a move from there gains at most the horizon, less its cost."""
    gains = gains_s(CAMPUS, JOB, SAVING, (1e9, 0.0), _pairs([1e9, 0.0, 0.0]))
    assert 0 < gains[2] < JOB.remaining_s
    assert not np.isfinite(gains_s(CAMPUS, JOB, SAVING, (1e9, 0.0), _pairs([1e9, 1e8, 1e8]))).any()


def test_departures_follow_the_time_of_day_for_hours() -> None:
    rate = Rate(0.5, 0.1, 2.0, 1.0)
    assert rate.expected(3600.0) == (0.5, 2.0)
    assert rate.expected(NEAR_S + 7200.0) == pytest.approx((8 * 0.5 + 2 * 0.1, 8 * 2.0 + 2 * 1.0))


def test_a_departure_with_notice_costs_a_migration() -> None:
    """The job has time to save, so it loses no work."""
    stays, leaves = (
        joint_score((*CAMPUS[:2], Building("campus", "c", link_mbit=1000.0, rate=rate)), JOB, SAVING)[2].score_s
        for rate in (Rate(), Rate(0.0, 0.0, 0.1, 0.1))
    )
    assert leaves - stays == pytest.approx(48 * 0.1 * _next_s(2))


def test_forecasts_look_ahead_for_days_at_most() -> None:
    assert (horizon_s(0.0), horizon_s(7200.0), horizon_s(1e9)) == (60.0, 7200.0, EARLY_HORIZON_S)


def test_a_job_in_no_building() -> None:
    with pytest.raises(ValueError, match="building: campus/z: must be one of the 3 buildings"):
        gains_s(CAMPUS, Departure("campus", "z", C, None, 3600.0, 0), SAVING, (1.0, 0.0), [(0.0, 0.0)] * 3)
