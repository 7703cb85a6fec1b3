"""Pools in the simulator: growth, notices, refused launches, costs, and equality of both engines."""

import random
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml

from capacity.pools import Pool
from capacity.providers.trace.settings import TraceProviderSettings
from infra.errors import ConfigurationError
from research.supply.sources import Sources
from research.traces.fleet import load_simulated_fleet
from simulation.run import Scenario
from simulation.settings import SimulationSettings
from tests.depth import examples
from tests.simulation.scenarios import (
    GIB,
    SURE,
    happenings,
    machines,
    random_scenario,
    scenario,
    when,
    workload,
)

SEEDS = range(max(3, examples(8)))  # Fewer scenarios may have too few evictions and refusals.
TYPES = {"p4": {"gpus": 8, "gpu_type": "a100", "cpus": 64, "memory": 512 * GIB, "usd_per_h": 36.0}}


BURST = Pool("east", "burst", 0, max_size=2, idle_s=600.0)


def cloud(
    start_s: float = 100.0, notice_s: float = 120.0, sigma: float = 0.0, **zones: dict[str, Any]
) -> TraceProviderSettings:
    """Returns a trace provider with one machine type; all launches take equally long unless `sigma` is set."""
    body = {name: {"region": "east", **zone} for name, zone in zones.items()}
    return TraceProviderSettings.model_validate(
        {
            "zones": body, "machine_types": TYPES, "start_median_s": start_s, "start_sigma": 0.0,
            "notice_s": notice_s,
        }
    )  # fmt: skip


def sources(of: TraceProviderSettings, pool: Pool = BURST) -> Sources:
    """Returns one pool on one provider."""
    return Sources({pool.key: pool}, {"sim": of})


def two_gangs(of: TraceProviderSettings, duration_s: float = 1000.0) -> Scenario:
    """Returns two gangs and one static machine; the second gang waits for it or for a machine of the pool."""
    work = [workload("first", duration_s=3000.0), workload("second", submit_s=10.0, duration_s=duration_s)]
    return scenario(machines("east", 1), work, sources=sources(of))


def test_a_pool_grows_for_what_waits_and_shrinks() -> None:
    """The pool launches a machine at its next check (20 s); it joins 100 s later and is paid until it is terminated."""
    run, seen = happenings(two_gangs(cloud(za={"most": 5})))
    assert when(seen, "started") == {"first": 0.0, "second": 120.0}
    assert when(seen, "finished") == {"first": 3000.0, "second": 1120.0}
    assert run.to_json()["run"]["pools"] == {"launched": 1, "refused": 0, "taken": 0, "ended": 1}
    # The machine was idle from 1120 s on and was terminated 600 s later; launched at 20 s, it existed for 1700 s.
    assert run.meter.total.usd == pytest.approx({"reserved": 0.0, "spot": 36.0 * 1700 / 3600})
    assert run.meter.total.supply_gpu_s == 8 * 3000 + 8 * 1600


def test_what_is_taken_with_notice_goes_on_elsewhere() -> None:
    """A gang whose machine is interrupted with a notice continues on the next machine.

    The zone has a machine for 400 s and none for 400 s; a refused launch is retried every 120 s.
    """
    of = cloud(za={"counts": [1, 0], "gap_s": 400.0}, start_s=80.0)
    run, seen = happenings(two_gangs(of, duration_s=700.0))
    second = [(one.at_s, one.what) for one in seen if one.workload == "second"]
    assert second == [
        (10.0, "submitted"), (100.0, "awarded"), (100.0, "started"), (400.0, "interrupted"), (410.0, "left"),
        (970.0, "awarded"), (970.0, "started"), (1200.0, "interrupted"), (1210.0, "left"),
        (1770.0, "awarded"), (1770.0, "started"), (1940.0, "finished"),
    ]  # fmt: skip
    total = run.meter.total
    assert (total.interruptions, total.preemptions, total.lost_gpu_s["work"]) == (2, 0, 0.0)
    report = run.to_json()["run"]
    assert report["pools"]["taken"] == 3  # The third machine was idle.
    assert report["usd"] == pytest.approx(sum(report["usd_by"].values()))


def test_without_a_save_the_work_since_the_last_checkpoint_is_lost() -> None:
    """Without a save, the work since the last checkpoint is lost, with 100 s between checkpoints.

    A machine that is interrupted at 300 s of work loses none; one that is interrupted 30 s later loses 30 s.
    """
    of = cloud(za={"counts": [1, 0, 0, 0, 0, 0, 0, 0], "gap_s": 430.0}, start_s=80.0)
    run, _ = happenings(replace(two_gangs(of), settings=SURE.model_copy(update={"flush_succeeds": 0.0})))
    assert run.meter.total.lost_gpu_s["work"] == 8 * 30.0


def test_a_full_zone_sends_the_pool_to_the_next() -> None:
    """After a refused launch, the pool tries the more expensive zone at its next check."""
    of = cloud(za={"most": 0}, zb={"most": 1, "price_factor": 2.0, "kind": "on_demand"})
    run, seen = happenings(two_gangs(of))
    assert when(seen, "started")["second"] == 130.0
    assert run.to_json()["run"]["pools"]["refused"] == 1
    assert run.meter.total.usd["on_demand"] == pytest.approx(72.0 * 1700 / 3600)


def test_a_size_and_a_buffer_are_kept_from_the_start() -> None:
    """The pool starts with its size and its buffer, and launches one more machine for each busy one.

    No workload waits for a launch that the buffer covers.
    """
    pool = Pool("east", "burst", 1, max_size=3, idle_s=600.0, buffer=1)
    work = [workload(f"w{n}", submit_s=200.0 * n + 150.0, duration_s=5000.0) for n in range(3)]
    scene = scenario([], work, sources=sources(cloud(za={"most": 9}), pool), until_s=5000.0)
    run, seen = happenings(replace(scene, machines={"east": ()}))
    assert when(seen, "started") == {"w0": 150.0, "w1": 350.0, "w2": 550.0}
    assert run.to_json()["run"]["pools"]["launched"] == 3


def test_a_run_ends_where_nothing_can_come() -> None:
    """The run ends when no event can occur any more: a zone without machines is retried until its trace ends."""
    scene = two_gangs(cloud(za={"counts": [0, 0, 0], "gap_s": 600.0}))
    work = [workload("never", gpus=8, tasks=2, duration_s=10.0)]
    run, seen = happenings(replace(scene, workloads=work))
    assert [one.what for one in seen] == ["submitted"]
    assert run.to_json()["run"]["pools"]["refused"] > 10
    assert run.to_json()["run"]["fit_nowhere"] == []
    assert run.simulator.progress.now_s < 3 * 1920


def test_an_evictor_on_a_machine_that_goes_moves_on() -> None:
    """An evictor whose awaited machine is interrupted while the victim leaves is awarded again elsewhere."""
    low = workload("low", submit_s=0.0, duration_s=5000.0, level=7)
    home = workload("home", submit_s=0.0, duration_s=1000.0, level=1)
    high = workload("high", submit_s=395.0, duration_s=100.0, level=2)
    of = cloud(za={"counts": [1, 0, 0, 0], "gap_s": 400.0}, start_s=80.0)
    scene = scenario(machines("east", 1), [home, low, high], sources=sources(of))
    _, seen = happenings(scene)
    story = [(one.at_s, one.what) for one in seen if one.workload == "high"]
    assert story == [
        (395.0, "submitted"), (395.0, "awarded"), (405.0, "interrupted"), (415.0, "left"),
        (1000.0, "awarded"), (1000.0, "started"), (1100.0, "finished"),
    ]  # fmt: skip


QUICK = SimulationSettings(
    provisioning_p50_s=20, provisioning_p90_s=30, provisioning_p99_s=40, eviction_s=30, flush_succeeds=0.5,
    reserve_after_s=inf, grow=False,
)  # fmt: skip


def random_pools(seed: int) -> Scenario:
    """Returns a random scenario with two pools in zones whose number of machines changes."""
    chance = random.Random(seed)
    scene = random_scenario(seed, QUICK)
    counts = [[chance.randint(0, 4) for _ in range(9)] for _ in range(3)]
    zones = {
        "za": {"region": "east", "counts": counts[0], "gap_s": 300.0},
        "zb": {"region": "west", "counts": counts[1], "gap_s": 500.0},
        "zc": {"region": "east", "counts": counts[2], "gap_s": 700.0, "price_factor": 2.0, "kind": "on_demand"},
    }
    types = {**TYPES, "p3": {**TYPES["p4"], "gpus": 4, "gpu_type": "v100", "usd_per_h": 9.0}}
    body = {"zones": zones, "machine_types": types, "start_median_s": 60.0, "notice_s": chance.choice((0, 10, 60))}
    pools = [Pool("east", "a", 1, max_size=4, idle_s=200.0, buffer=1), Pool("west", "b", 0, max_size=3, idle_s=90.0)]
    states = {"west": (), **scene.machines}
    return replace(
        scene,
        machines=states,
        sources=Sources({pool.key: pool for pool in pools}, {"sim": TraceProviderSettings.model_validate(body)}),
        until_s=20_000.0,
    )


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        ("global", SEEDS[0]),
        *(pytest.param("global", seed, marks=pytest.mark.long) for seed in SEEDS[1:]),
        ("fifo", 1),
    ],
)
def test_both_engines_do_the_same_with_pools(policy: str, seed: int) -> None:
    """Every event, cost and count is the same in both engines, and no workload holds a machine that does not exist."""
    scene = random_pools(seed)
    fast, seen = happenings(scene, policy)
    plain, expected = happenings(scene, policy, plain=True)
    assert seen == expected
    assert fast.meter.total == plain.meter.total
    assert fast.simulator.keeper.counts == plain.simulator.keeper.counts
    assert fast.simulator.progress.finished > 20


def test_random_pools_take_refuse_and_end() -> None:
    """The random scenarios include launches, refusals, interruptions and terminations, and interrupted gangs."""
    runs = [happenings(random_pools(seed))[0] for seed in SEEDS]
    counts = [run.simulator.keeper.counts for run in runs]
    assert min(sum(getattr(one, name) for one in counts) for name in ("launched", "refused", "taken", "ended")) > 10
    assert sum(run.meter.total.interruptions for run in runs) > 10
    assert all(sum(run.meter.slots) <= sum(run.meter.supply.values()) + 4 * 8 + 3 * 8 for run in runs)


def test_gangs_grow_while_machines_end() -> None:
    """Elastic gangs grow on machines that come and go: all work is done, and no slot is held twice or lost."""
    growths = 0
    for seed in SEEDS:
        scene = random_pools(seed)
        settings = scene.settings.model_copy(update={"grow": True, "min_runtime_s": 60.0})
        run = happenings(replace(scene, settings=settings, until_s=60_000.0))[0]
        growths += run.meter.total.growths
        assert run.simulator.progress.finished > 20
        for ledger in run.simulator.transitions.ledgers.values():
            ledger.check()
            assert all(holder.isdigit() for holder in ledger.held)  # No booking is left over.
    assert growths > 20


def test_policies_that_bind_to_a_fleet_have_no_pools() -> None:
    """Policies that bind workloads to a fixed fleet reject pools before a run."""
    for policy in ("federated", "cluster", "slurm", "kueue"):
        with pytest.raises(ConfigurationError, match=f"--policy {policy}: must be one of global, fifo"):
            happenings(two_gangs(cloud(za={"most": 1})), policy)


FILE: dict[str, Any] = {
    "version": 1,
    "regions": [{"name": "east", "clusters": []}],
    "providers": {"sim": {"kind": "trace", "zones": {"za": {"region": "east", "most": 2}}, "machine_types": TYPES}},
    "pools": [{"region": "east", "name": "burst", "max_size": 2, "kinds": ["spot"]}],
    "tenants": {"vision": {"quota": {"a100": 16}}},
}


def test_a_fleet_file_has_pools(tmp_path: Path) -> None:
    """Fleet files have pools in the format of settings; quotas may name GPU types that only pools have."""
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(FILE))
    fleet = load_simulated_fleet(path)
    assert fleet.sources.pools == {
        ("east", "burst"): Pool("east", "burst", 0, kinds=("spot",), max_size=2)  # type: ignore[arg-type]
    }
    assert [len(states) for states in fleet.possible().values()] == [2]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"pools": [{**FILE["pools"][0], "region": "mars"}]}, "pools\\[0\\].region: 'mars'"),
        ({"pools": [{**FILE["pools"][0], "kinds": ["on_demand"]}]}, "pools\\[0\\]: burst: no provider offers"),
        ({"pools": [{**FILE["pools"][0], "size": 3}]}, "max_size: must be at least size, 3; it is 2"),
        ({"pools": [{**FILE["pools"][0], "buffer": 3}]}, "buffer: must be at most max_size; it is 3"),
        ({"pools": FILE["pools"] * 2}, "two pools have the same region and name"),
        ({"pools": [{**FILE["pools"][0], "sise": 3}]}, "sise"),
        ({"providers": {"sim": {**FILE["providers"]["sim"], "kind": "ec2"}}}, "kind"),
        ({"tenants": {"vision": {"quota": {"h100": 16}}}}, "h100"),
    ],
)
def test_a_fleet_file_with_a_mistake_is_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    """An invalid fleet file is rejected with the field and what would be right."""
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(FILE | change))
    with pytest.raises(ConfigurationError, match=complaint):
        load_simulated_fleet(path)
