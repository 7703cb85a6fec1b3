"""Starting from a snapshot of the live system, with a change or without."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from domain.live import LiveSnapshot
from infra.errors import ConfigurationError
from simulation.live import change, live_scenario, load_live, remaining_after_s
from simulation.policies import POLICIES
from simulation.run import Run
from simulation.transitions import Happened
from tests.simulation.scenarios import GIB, SURE, when, where

NOW = datetime(2026, 1, 2, 3, tzinfo=UTC)


def machine(region: str, number: int) -> dict[str, Any]:
    """A machine of 8 GPUs."""
    amounts = {"gpus": 8, "cpus_milli": 64_000, "memory_bytes": 512 * GIB}
    return {
        "id": f"{region}/c1/m{number}",
        "region": region,
        "cluster": "c1",
        "rack": "r1",
        "gpu_type": "a100",
        **amounts,
    }


def workload(name: str, region: str | None = None, **more: Any) -> dict[str, Any]:
    """A gang of a machine, submitted an hour ago; in a region it runs since 1000 s ago."""
    job = {
        "name": "main", "tasks": 1, "gpus_per_task": 8, "gpu_types": ["a100"], "cpus_milli_per_task": 8000,
        "memory_bytes_per_task": GIB,
    }  # fmt: skip
    placement = None
    if region is not None:
        began = NOW - timedelta(seconds=1000)
        held = {"machine": f"{region}/c1/m1", "gpus": 8, "cpus_milli": 8000, "memory_bytes": GIB}
        placement = {
            "region": region,
            "awarded_at": began,
            "started_at": began,
            "gpus": {"a100": 8},
            "holdings": [held],
        }
    body = {
        "id": name, "tenant": "vision", "submitted_at": NOW - timedelta(hours=1), "held": False, "jobs": [job],
        "regions": None, "ran_s": 1000.0 if region else 0.0, "max_runtime_s": 3000.0, "placement": placement,
    }  # fmt: skip
    return {**body, **more}


def snapshot(*workloads: dict[str, Any], regions: tuple[str, ...] = ("east", "west"), quota: int = 16) -> LiveSnapshot:
    """One machine a region, one tenant."""
    tenant = {"name": "vision", "level": 2, "quota_gpus": {"a100": quota}, "quota_cpus_milli": None}
    machines = [machine(region, 1) for region in regions]
    body = {"taken_at": NOW, "machines": machines, "tenants": [tenant], "workloads": list(workloads)}
    return LiveSnapshot.model_validate(body)


def ran(live: LiveSnapshot) -> tuple[Run, list[Happened]]:
    """A run from a snapshot to its end."""
    seen: list[Happened] = []
    run = Run(live_scenario(live, SURE, seed=1), POLICIES["global"], follow=seen.append).go()
    for ledger in run.simulator.transitions.ledgers.values():
        ledger.check()
    return run, seen


def test_what_runs_ends_at_its_maximum_runtime_and_what_waits_follows() -> None:
    """2000 s are left of what runs; one takes the free machine at once, the other waits for the first to end."""
    run, seen = ran(snapshot(workload("runs", "east"), workload("a-waits"), workload("b-waits")))
    assert when(seen, "finished") == {"runs": 2000, "a-waits": 3000, "b-waits": 5000}
    assert where(seen) == {"a-waits": "west", "b-waits": "east"}
    assert run.meter.total.held_gpu_s == 8 * (2000 + 3000 + 3000)


def test_a_gang_that_may_span_clusters_does() -> None:
    """Two clusters of a machine each hold a gang of two machines only together; other gangs of that size never run."""
    live = snapshot(workload("spans"), workload("does-not"), regions=("east",))
    spans, does_not = (
        w.model_copy(update={"jobs": tuple(replace(j, tasks=2, span_clusters=s) for j in w.jobs)})
        for w, s in zip(live.workloads, (True, False), strict=True)
    )
    other = live.machines[0].model_copy(update={"id": "east/c2/m1", "cluster": "c2"})
    _, seen = ran(live.model_copy(update={"machines": (*live.machines, other), "workloads": (spans, does_not)}))
    assert where(seen) == {"spans": "east"} and list(when(seen, "finished")) == ["spans"]


def test_a_drained_region_gives_its_work_back_to_the_queue() -> None:
    """What ran there waits as of now, and there is less supply."""
    live = snapshot(workload("runs", "east"), workload("other", "west"))
    run, seen = ran(change(live, (), ("east",)))
    assert run.meter.supply == {"a100": 8}
    assert when(seen, "awarded") == {"runs": 2000}
    assert where(seen) == {"runs": "west"}
    assert run.meter.total.until["award"].waits_s[2, False] == [2000]


def test_another_quota_changes_who_is_over_it() -> None:
    """With 8 slots the second of two is over-quota; with the 16 of the snapshot it is not."""
    live = snapshot(workload("runs", "east"), workload("waits"))
    within, over = ran(live)[0], ran(change(live, ("quota.vision.a100=8",), ()))[0]
    assert within.meter.total.until["award"].judged == {(2, False): 1}
    assert over.meter.total.until["award"].judged == {(2, True): 1}


def test_held_workloads_stay_where_they_are() -> None:
    """A held one is not simulated, and is named."""
    run, seen = ran(snapshot(workload("held", held=True), workload("free")))
    assert set(when(seen, "finished")) == {"free"}
    assert run.to_json()["run"]["held_back"] == ["held"]


def test_what_runs_can_be_evicted_and_goes_on() -> None:
    """A higher level takes its machine; its work up to then is kept."""
    low = {"name": "nlp", "level": 5, "quota_gpus": {"a100": 16}, "quota_cpus_milli": None}
    live = snapshot(workload("low", "east", tenant="nlp"), workload("high"), regions=("east",))
    live = LiveSnapshot.model_validate({**live.model_dump(), "tenants": [*(t.model_dump() for t in live.tenants), low]})
    _, seen = ran(live)
    assert when(seen, "evicted") == {"low": 0}
    assert when(seen, "finished") == {"high": 3010, "low": 3010 + 2000}


def test_without_a_maximum_runtime_the_rest_is_drawn() -> None:
    """From MAST's distribution: the median is 20 minutes, and longer for what has run for longer."""
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
    """Named, with what would be right."""
    with pytest.raises(ConfigurationError) as refused:
        change(snapshot(), assignments, drained)
    assert says in str(refused.value)


def test_a_file_that_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    """Every field that is wrong is named; a machine cannot be held more than once."""
    path = tmp_path / "live.json"
    path.write_text(snapshot().model_dump_json().replace('"gpus":8', '"gpus":-8'))
    with pytest.raises(ConfigurationError, match=r"machines\.0\.gpus: -8: Input should be greater than or equal to 0"):
        load_live(path)
    with pytest.raises(ConfigurationError, match="No such file"):
        load_live(tmp_path / "none.json")
    path.write_text(snapshot(workload("a", "east"), workload("b", "east")).model_dump_json())
    with pytest.raises(ConfigurationError, match="machine east/c1/m1: workloads hold more than the machine has"):
        live_scenario(load_live(path), SURE, 0)
