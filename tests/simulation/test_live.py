"""Simulation from a snapshot of the live system, with and without a change."""

from dataclasses import replace
from pathlib import Path

import pytest

from domain.live import LiveSnapshot
from infra.errors import ConfigurationError
from simulation.live import change, live_scenario, load_live, remaining_after_s
from simulation.policies import POLICIES
from simulation.run import Run
from simulation.transitions import Happened
from tests.simulation.live import snapshot, workload
from tests.simulation.scenarios import SURE, when, where


def ran(live: LiveSnapshot) -> tuple[Run, list[Happened]]:
    """Runs a simulation from a snapshot to its end."""
    seen: list[Happened] = []
    run = Run(live_scenario(live, SURE, seed=1), POLICIES["global"], follow=seen.append).go()
    for ledger in run.simulator.transitions.ledgers.values():
        ledger.check()
    return run, seen


def test_what_runs_ends_at_its_maximum_runtime_and_what_waits_follows() -> None:
    """A running workload ends at its maximum runtime, and queued ones get the free machine or wait for its end."""
    run, seen = ran(snapshot(workload("runs", "east"), workload("a-waits"), workload("b-waits")))
    assert when(seen, "finished") == {"runs": 2000, "a-waits": 3000, "b-waits": 5000}
    assert where(seen) == {"a-waits": "west", "b-waits": "east"}
    assert run.meter.total.held_gpu_s == 8 * (2000 + 3000 + 3000)


def test_a_gang_that_may_span_clusters_does() -> None:
    """A gang of two machines runs on two one-machine clusters only if it may span clusters."""
    live = snapshot(workload("spans"), workload("does-not"), regions=("east",))
    spans, does_not = (
        w.model_copy(update={"jobs": tuple(replace(j, tasks=2, span_clusters=s) for j in w.jobs)})
        for w, s in zip(live.workloads, (True, False), strict=True)
    )
    other = live.machines[0].model_copy(update={"id": "east/c2/m1", "cluster": "c2"})
    _, seen = ran(live.model_copy(update={"machines": (*live.machines, other), "workloads": (spans, does_not)}))
    assert where(seen) == {"spans": "east"} and list(when(seen, "finished")) == ["spans"]


def test_a_drained_region_gives_its_work_back_to_the_queue() -> None:
    """Workloads of a drained region are queued again, with waits that start now, and the supply is smaller."""
    live = snapshot(workload("runs", "east"), workload("other", "west"))
    run, seen = ran(change(live, (), ("east",)))
    assert run.meter.supply == {"a100": 8}
    assert when(seen, "awarded") == {"runs": 2000}
    assert where(seen) == {"runs": "west"}
    assert run.meter.total.until["award"].waits_s[2, False] == [2000]


def test_another_quota_changes_who_is_over_it() -> None:
    """With a quota of 8 slots, the second of two workloads is over-quota; with the snapshot's 16, it is not."""
    live = snapshot(workload("runs", "east"), workload("waits"))
    within, over = ran(live)[0], ran(change(live, ("quota.vision.a100=8",), ()))[0]
    assert within.meter.total.until["award"].judged == {(2, False): 1}
    assert over.meter.total.until["award"].judged == {(2, True): 1}


def test_held_workloads_stay_where_they_are() -> None:
    """A held workload is not simulated, and is listed in the outcome."""
    run, seen = ran(snapshot(workload("held", held=True), workload("free")))
    assert set(when(seen, "finished")) == {"free"}
    assert run.to_json()["run"]["held_back"] == ["held"]


def test_what_runs_can_be_evicted_and_goes_on() -> None:
    """A workload of a higher level evicts a running one, which keeps its work until then."""
    low = {"name": "nlp", "level": 5, "quota_gpus": {"a100": 16}, "quota_cpus_milli": None}
    live = snapshot(workload("low", "east", tenant="nlp"), workload("high"), regions=("east",))
    live = LiveSnapshot.model_validate({**live.model_dump(), "tenants": [*(t.model_dump() for t in live.tenants), low]})
    _, seen = ran(live)
    assert when(seen, "evicted") == {"low": 0}
    assert when(seen, "finished") == {"high": 3010, "low": 3010 + 2000}


def test_without_a_maximum_runtime_the_rest_is_drawn() -> None:
    """Without a maximum runtime, the rest is drawn from MAST's distribution, whose median is 20 minutes.

    The rest is longer for a workload that has run for longer.
    """
    assert remaining_after_s(0, 0.5) == pytest.approx(1200)
    assert remaining_after_s(3600, 0.5) > remaining_after_s(600, 0.5) > 600
    live = snapshot(workload("runs", "east", max_runtime_s=None))
    first, again = ran(live)[1], ran(live)[1]
    assert first == again
    assert 0 < when(first, "finished")["runs"] != 2000


@pytest.mark.parametrize(
    ("assignments", "drained", "says"),
    [
        (("quota.vision.a100",), (), "must be quota.TENANT.TYPE=SLOTS"),
        (("quota.vision.a100=-1",), (), "must be quota.TENANT.TYPE=SLOTS"),
        (("level.vision=1",), (), "must be quota.TENANT.TYPE=SLOTS"),
        (("quota.nlp.a100=1",), (), "tenant 'nlp': must be one of vision"),
        (("quota.vision.h100=1",), (), "GPU type 'h100': must be one of a100"),
        ((), ("north",), "--drain north: must be one of east, west"),
        ((), ("east", "west"), "must leave at least one region"),
    ],
)
def test_a_change_that_cannot_be_is_refused(assignments: tuple[str, ...], drained: tuple[str, ...], says: str) -> None:
    """An invalid change is rejected with the valid values."""
    with pytest.raises(ConfigurationError) as refused:
        change(snapshot(), assignments, drained)
    assert says in str(refused.value)


def test_a_file_that_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    """Every invalid field of a snapshot is named; holdings beyond a machine's resources are rejected."""
    path = tmp_path / "live.json"
    path.write_text(snapshot().model_dump_json().replace('"gpus":8', '"gpus":-8'))
    with pytest.raises(ConfigurationError, match=r"machines\[0\]\.gpus: must be at least 0, it is -8"):
        load_live(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        load_live(tmp_path / "none.json")
    path.write_text(snapshot(workload("a", "east"), workload("b", "east")).model_dump_json())
    with pytest.raises(ConfigurationError, match="machine east/c1/m1: workloads hold more than the machine has"):
        live_scenario(load_live(path), SURE, 0)
