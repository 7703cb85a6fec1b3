"""The simulator against scenarios that are computed by hand, and what must hold for every system and scenario."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from research.reclaim.engine import simulate
from research.reclaim.network import max_min
from research.reclaim.scenario import LendingScenario, Traffic
from research.reclaim.scenario_files import ScenarioDocument, build
from research.reclaim.state import STALL_SHARE
from research.reclaim.systems import SYSTEMS, StorePlacement, System
from tests.research.reclaim.tiny import HOUR_S, LOCAL_BYTES_S, scenario

SIZE = 3e9  # 30 s within a building, 120 s to another, 3 s on the local disk.
STALL_S = STALL_SHARE * 3.0
ALL = ("slurm-pr", "slurm-pr-local", "no-migration", "static", "bamboo-like", "random-dst", "no-shaping", "tv-fi",
       "published", "reclaimnet", "sdk", "true-rates", "joint", "none", "p1", "p2", "p3", "p2+p3")  # fmt: skip


def fixed(interval_s: float, **changes: object) -> System:
    return replace(SYSTEMS["none"], interval_s=interval_s, **changes)  # type: ignore[arg-type]


def test_emergency_by_hand() -> None:
    # The job starts at 30 s and saves every 600 s: at 630, 1230, ... The machine leaves at 3500 s. The newest complete
    # checkpoint is that of 3030 s, of which 4 stalls are subtracted.
    given = scenario(intervals=[(0, 0, 3500, 0), (1, 1000, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)])
    found = simulate(given, fixed(600))
    (hit,) = found.hits
    assert hit.lost_s == pytest.approx(3500 - 3030 - STALL_S)
    # The checkpoint takes 30 s to the other machine, and the restart 30 s.
    assert hit.resumed_s - hit.stopped_s == pytest.approx(60)
    assert not hit.handed_over and hit.succeeded(60) and not hit.succeeded(59)
    # Clairvoyant: a checkpoint that completes just before 3500 s holds the work up to 3470 s.
    assert hit.clairvoyant_s == pytest.approx(30)
    assert found.finished == 1


def test_departure_during_a_checkpoint_loses_the_interval_before() -> None:
    given = scenario(intervals=[(0, 0, 1250, 0), (1, 0, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)])
    # The second checkpoint, begun at 1230 s, would be complete at 1260 s.
    (hit,) = simulate(given, fixed(600)).hits
    assert hit.lost_s == pytest.approx(1250 - 630 - 2 * STALL_S)


@pytest.mark.parametrize(("notice_s", "lost"), [(130.0, False), (70.0, True)])
def test_notice_by_hand(notice_s: float, lost: bool) -> None:
    # The other machine is in another building: 120 s of transfer without shaping.
    given = scenario(
        intervals=[(0, 0, 2000, notice_s), (1, 0, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)], building=(0, 1)
    )
    (hit,) = simulate(given, fixed(600)).hits
    assert hit.stopped_s == 2000 - notice_s
    if lost:
        # It stopped for a transfer that did not complete, and restarts from the checkpoint of 1830 s.
        assert hit.lost_s == pytest.approx(2000 - notice_s - 1830 - STALL_S)
        assert hit.resumed_s == pytest.approx(2000 + 120 + 30)
    else:
        assert hit.lost_s == 0 and hit.handed_over
        assert hit.resumed_s == pytest.approx(2000 - notice_s + 120 + 30)


def test_reclaimnet_refuses_what_cannot_complete_and_saves_instead() -> None:
    # 60 s suffice for an upload within the building at 0.7 of 100 MB/s, but not for a transfer to the other.
    given = scenario(
        intervals=[(0, 0, 5000, 60.0), (1, 0, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)], building=(0, 1)
    )
    (hit,) = simulate(given, SYSTEMS["reclaimnet"]).hits
    upload_s = SIZE / 70e6
    assert not hit.handed_over
    assert hit.stopped_s == 5000
    # The final checkpoint began when the notice still lasted 1.3 times the upload: that much work is lost, no more.
    assert hit.lost_s == pytest.approx(1.3 * upload_s - STALL_S, abs=0.01)


def test_a_job_that_cannot_move_saves_at_once_and_again_late() -> None:
    # 120 s are enough for two uploads with the margin, but not for a transfer of 171 s to the other building.
    given = scenario(
        intervals=[(0, 0, 5000, 120.0), (1, 0, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)], building=(0, 1)
    )
    system = SYSTEMS["reclaimnet"]
    (hit,) = simulate(given, system).hits
    assert hit.lost_s == pytest.approx(1.3 * SIZE / 70e6 - STALL_S, abs=0.01)
    # The link is slower from 4940 s on. The first of the two is complete by then, begun with the notice at 4880 s.
    links = given.links_bytes_s.copy()
    links[0, 4940 // 60 + 1 :] /= 10
    (hit,) = simulate(replace(given, links_bytes_s=links), system).hits
    assert hit.lost_s == pytest.approx(120 - STALL_S - STALL_S, abs=0.01)


def test_no_migration_waits_for_its_machine() -> None:
    given = scenario(
        intervals=[(0, 0, 3600, 0), (0, 7200, 10 * HOUR_S, 0), (1, 4000, 10 * HOUR_S, 0)],
        jobs=[(0, 1, 2 * HOUR_S, SIZE)],
    )
    found = simulate(given, SYSTEMS["no-migration"])
    (hit,) = found.hits
    assert hit.resumed_s == pytest.approx(7230)
    assert found.migrated_bytes == found.written_bytes == 0


def test_writes_share_the_link_of_a_building() -> None:
    # Two jobs start together and save together: each write takes twice as long, 60 s, so the checkpoint that was begun
    # at 630 s is not complete at 680 s, and all work is lost.
    given = scenario(
        intervals=[(0, 0, 680, 0), (1, 0, 10 * HOUR_S, 0), (2, 0, 10 * HOUR_S, 0)],
        jobs=[(0, 1, 5 * HOUR_S, SIZE), (0, 1, 5 * HOUR_S, SIZE)],
        building=(0, 0, 0), gpus=(1, 1, 1), switch_bytes_s=LOCAL_BYTES_S,
    )  # fmt: skip
    (hit,) = simulate(given, fixed(600)).hits
    assert hit.lost_s == pytest.approx(650 - STALL_S)


@pytest.mark.parametrize(("machines", "at_s", "kept"), [((0, 1), 661, True), ((0, 0), 661, False), ((0, 0), 691, True)])
def test_writes_share_the_link_of_a_machine(machines: tuple[int, int], at_s: float, kept: bool) -> None:
    # Two jobs save together, from 630 s on. On two machines each write takes 30 s, on one machine 60 s.
    given = scenario(
        intervals=[(0, 0, at_s, 0), *((n, 1000.0 * (machines == (0, 0)), 10 * HOUR_S, 0) for n in (1, 2))],
        jobs=[(0, 1, 5 * HOUR_S, SIZE), (0, 1, 5 * HOUR_S, SIZE)],
        building=(0, 0, 0), gpus=(2, 1, 1) if machines == (0, 0) else (1, 1, 1),
    )  # fmt: skip
    found = simulate(given, fixed(600)).hits
    assert [hit.node for hit in found] == [0] * machines.count(0)
    for hit in found:
        assert hit.lost_s == pytest.approx(at_s - 630 - STALL_S if kept else at_s - 30 - STALL_S)


def test_central_store_by_hand() -> None:
    # To the core and back over 25 MB/s: 120 s each way, also within one building.
    given = scenario(intervals=[(0, 0, 2000, 0), (1, 1000, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)])
    (hit,) = simulate(given, fixed(600, store=StorePlacement.CENTRAL)).hits
    assert hit.lost_s == pytest.approx(2000 - 1830 - STALL_S)
    assert hit.resumed_s - hit.stopped_s == pytest.approx(120 + 30)
    early = scenario(intervals=[(0, 0, 1940, 0), (1, 1000, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)])
    # The checkpoint begun at 1830 s would be complete at 1950 s.
    (hit,) = simulate(early, fixed(600, store=StorePlacement.CENTRAL)).hits
    assert hit.lost_s == pytest.approx(1940 - 1230 - 2 * STALL_S)


def test_research_traffic_without_and_with_shaping() -> None:
    # Research offers 0.3 of the link. Four connections of one transfer leave it a fifth: a third of it is displaced.
    given = scenario(
        intervals=[(0, 0, 2000, 0), (1, 0, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, SIZE)],
        traffic=Traffic(research_share=0.3, connections=4, overhead_share=0.0, write_bytes_s=1e9),
    )  # fmt: skip
    assert simulate(given, SYSTEMS["none"]).degradation == pytest.approx(1 / 3)
    assert simulate(given, SYSTEMS["p3"]).degradation == pytest.approx(0, abs=1e-9)


def test_max_min() -> None:
    # Link 0 is shared by all; the first flow stops at link 1, the third at its limit.
    wants = [((0, 1), 1.0, 1e9), ((0,), 2.0, 1e9), ((0,), 1.0, 5.0)]
    assert max_min(wants, [100.0, 10.0]) == pytest.approx([10.0, 85.0, 5.0])


@pytest.fixture(scope="module")
def short() -> LendingScenario:
    """Two days of twenty jobs."""
    return build(
        ScenarioDocument(version=1, name="short", days=2, calibration_days=1, jobs={"count": 20, "gpu_hours": 250},  # type: ignore[arg-type]
                 availability={"drawn": {"departures": 300}}),  # type: ignore[arg-type]
        Path(),
        seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_gpu_time_is_conserved(short: LendingScenario, name: str) -> None:
    found = simulate(short, SYSTEMS[name])
    whole = found.whole
    assert whole.held == pytest.approx(whole.useful + whole.lost + whole.overhead, abs=1e-3)
    assert min(whole.useful, whole.saving, whole.moving, whole.shadow, whole.lost) >= 0
    held_s = np.minimum(short.lending.to_s, short.length_s) - short.lending.from_s
    assert whole.held <= float(held_s @ short.machines.gpus[short.lending.node]) + 1e-3
    # Each job's work is done once: what is useful never exceeds what the jobs ask for.
    assert whole.useful <= float(short.work.gpus @ short.work.work_s) + 1e-3
    assert len(found.hits) > 5
    for hit in found.hits:
        assert hit.lost_s >= 0 and hit.resumed_s >= hit.stopped_s
        assert not (hit.handed_over and hit.lost_s > 0)
        assert hit.notice_s > 0 or not hit.handed_over


DRAWN = ("random-dst", "reclaimnet", "p3")


@pytest.mark.parametrize(
    "name", [*DRAWN, *(pytest.param(name, marks=pytest.mark.long) for name in ALL if name not in DRAWN)]
)
def test_the_same_seed_gives_the_same_result(short: LendingScenario, name: str) -> None:
    first, second = (simulate(short, SYSTEMS[name]).row() for _ in range(2))
    first.pop("wall_s"), second.pop("wall_s")
    assert repr(first) == repr(second)


def test_true_rates_lose_less_than_fixed_intervals_in_emergencies() -> None:
    given = scenario(intervals=[(0, 0, 17_000, 0), (1, 0, 10 * HOUR_S, 0)], jobs=[(0, 1, 5 * HOUR_S, 100e6)])
    (best,), (worst,) = simulate(given, SYSTEMS["true-rates"]).hits, simulate(given, SYSTEMS["none"]).hits
    # 100 MB every minute is within a fifth of 70 MB/s.
    assert best.lost_s <= 62 < worst.lost_s
