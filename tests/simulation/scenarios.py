"""Small fleets and workloads for the simulator's tests."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from capacity.scaling import Shortage
from domain.scheduling import JobRequest, MachineState, TenantState
from reference.engine import on_reference
from research.rivals.policies import ALL_POLICIES
from simulation.meter import Meter
from simulation.run import Run, Scenario
from simulation.settings import SimulationSettings
from simulation.supply import Keeper, Supply
from simulation.transitions import Happened, Transitions
from simulation.workloads import SimulatedWorkload

GIB = 1 << 30
SURE = SimulationSettings(
    provisioning_p50_s=0, tick_spacing_s=1, eviction_s=10, checkpoint_interval_s=100, min_runtime_s=0
)
"""Settings without randomness and without provisioning times; a pass follows each change within one second.

Results can be computed by hand.
"""


def machines(region: str, count: int, gpu_type: str = "a100", cluster: str = "c1", gpus: int = 8) -> list[MachineState]:
    """Returns free machines of one GPU type, each with 8 cores and 64 GiB per GPU."""
    cpus, memory = 8000 * gpus, 64 * GIB * gpus
    amounts = gpus, gpus, cpus, memory, cpus, memory
    return [
        MachineState(f"{region}/{cluster}/{gpu_type}-{k:03d}", cluster, f"r{k % 2}", gpu_type, *amounts)
        for k in range(count)
    ]


def workload(
    name: str,
    gpus: int = 8,
    submit_s: float = 0.0,
    duration_s: float = 1000.0,
    level: int = 4,
    tenant: str = "vision",
    types: tuple[str, ...] = ("a100",),
    tasks: int = 1,
    regions: frozenset[str] | None = None,
) -> SimulatedWorkload:
    """Returns a workload of one job with equal tasks."""
    job = JobRequest("main", tasks, gpus, types if gpus else (), 1000 * max(1, gpus), GIB)
    return SimulatedWorkload(name, tenant, level, submit_s, submit_s, duration_s, (job,), regions)


def elastic(one: SimulatedWorkload, most_tasks: int) -> SimulatedWorkload:
    """Returns the workload with an elastic job: each of its GPUs is a task, and it may have `most_tasks` of them."""
    (job,) = one.jobs
    assert most_tasks > max(1, job.gpus), "no document makes a job elastic whose maximum is not above its minimum"
    return replace(one, jobs=(replace(job, tasks=max(1, job.gpus), gpus_per_task=min(1, job.gpus),
                                      cpus_milli_per_task=1000, most_tasks=most_tasks),))  # fmt: skip


def tenant(name: str, level: int = 1, **quota: int) -> TenantState:
    """Returns a tenant with a quota of slots by GPU type and no limit on CPUs."""
    return TenantState(name, level, quota, None, 0.0)


def scenario(
    states: list[MachineState],
    workloads: list[SimulatedWorkload],
    tenants: list[TenantState] | None = None,
    settings: SimulationSettings = SURE,
    **more: object,
) -> Scenario:
    """Returns a scenario; the default tenant `vision` has a quota of 1000 slots of each GPU type."""
    by_region: dict[str, list[MachineState]] = {}
    for m in states:
        by_region.setdefault(m.id.split("/")[0], []).append(m)
    named = tenants or [tenant("vision", a100=1000, v100=1000)]
    return Scenario(
        {region: tuple(found) for region, found in by_region.items()},
        {t.name: t for t in named},
        workloads,
        settings,
        **more,  # type: ignore[arg-type]
    )


def happenings(scene: Scenario, policy: str = "global", plain: bool = False) -> tuple[Run, list[Happened]]:
    """Runs a scenario to its end, and returns the run and all of its events."""
    seen: list[Happened] = []
    chosen = ALL_POLICIES[policy]
    run = Run(scene, on_reference(chosen) if plain else chosen, follow=seen.append)
    run.go()
    for ledger in run.simulator.transitions.ledgers.values():
        ledger.check()
    return run, seen


def when(seen: list[Happened], what: str) -> dict[str, float]:
    """Returns the time of the last event of a kind, by workload."""
    return {one.workload: one.at_s for one in seen if one.what == what}


def where(seen: list[Happened]) -> dict[str, str]:
    """Returns the region of the last award, by workload."""
    return {one.workload: str(one.place) for one in seen if one.what == "awarded"}


@dataclass(frozen=True)
class Losing(Supply):
    """Loses machines at given times: their regions and ids."""

    losses: tuple[tuple[float, str, str], ...]

    def keeper(
        self, transitions: Transitions, meter: Meter, waiting: Callable[[], list[Shortage]], seed: int
    ) -> Keeper:
        """Returns the keeper of a run."""
        return _LosingKeeper(self.losses, transitions)


class _LosingKeeper(Keeper):
    def __init__(self, losses: tuple[tuple[float, str, str], ...], transitions: Transitions) -> None:
        super().__init__(due_s=losses[0][0])
        self._losses, self._transitions = list(losses), transitions

    def happen(self, at_s: float) -> bool:
        _, region, machine = self._losses.pop(0)
        self._transitions.interrupt(at_s, region, machine, lost=True)
        self.due_s = self._losses[0][0] if self._losses else inf
        return True


def losing(scene: Scenario, *losses: tuple[float, str, str], repair: bool = True) -> Scenario:
    """Returns the scenario in which machines are lost."""
    settings = scene.settings.model_copy(update={"repair": repair})
    return replace(scene, sources=Losing(losses), settings=settings)


def random_scenario(seed: int, settings: SimulationSettings, count: int = 120) -> Scenario:
    """Returns two or three uneven regions, three tenants with small quotas, and more work than fits."""
    chance = random.Random(seed)
    states: list[MachineState] = []
    for region in ("east", "north", "west")[: chance.randint(2, 3)]:
        for gpu_type in ("a100", "v100"):
            for cluster in ("c1", "c2"):
                states += machines(region, chance.randint(0, 3), gpu_type, cluster)
    states += machines("east", 2, cluster="c3")
    tenants = [tenant(name, chance.choice((1, 1, 2, 4)), a100=24, v100=16) for name in ("nlp", "speech", "vision")]
    work = []
    for k in range(count):
        gpus = chance.choice((0, 1, 1, 2, 4, 8))
        types = tuple(chance.sample(("a100", "v100"), chance.randint(1, 2)))
        regions = frozenset(chance.sample(("east", "north", "west"), 2)) if chance.random() < 0.3 else None
        one = workload(
            f"w{k}", gpus, chance.randint(0, 4000), chance.choice((60, 600, 3000)), chance.randint(1, 7),
            chance.choice(("nlp", "speech", "vision")), types, chance.choice((1, 1, 2, 3)) if gpus == 8 else 1, regions,
        )  # fmt: skip
        if chance.random() < 0.3:
            one = elastic(one, max(1, one.gpus) + chance.choice((1, 7, 19)))
        work.append(replace(one, max_runtime_s=inf))
    return scenario(states, work, tenants, settings, seed=seed)
