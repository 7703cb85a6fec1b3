"""Detection of gangs that no region can ever hold: the message has figures, and there are no false positives."""

import random
from dataclasses import replace

import pytest

from api.documents.feasibility import EqualMachines, never
from domain.capacity import CapacityKind
from domain.spec import JobSpec, ResourceSpec, WorkloadSpec
from tests.api.documents import JOB, job, resources
from tests.api.world import GIB, ApiWorld

FLEET = [
    EqualMachines("east", "a", "a100", 4, 16_000, 64 * GIB, 2),
    EqualMachines("east", "b", "a100", 4, 16_000, 64 * GIB, 1),
    EqualMachines("west", "a", "v100", 8, 16_000, 64 * GIB, 1),
    EqualMachines("west", "a", None, 0, 64_000, 64 * GIB, 1),
]


def _job(
    tasks: int, gpus: int = 1, types: tuple[str, ...] = ("a100",), cpus_milli: int = 1000, **more: object
) -> JobSpec:
    wanted = ResourceSpec(gpus=gpus, gpu_types=types if gpus else (), cpus_milli=cpus_milli, memory_bytes=GIB)
    fields = {"name": "j", "role": "j", "argv": ("true",), **more}
    return JobSpec.model_validate({"tasks": tasks, "resources": wanted, **fields})


def _never(*jobs: JobSpec, **more: object) -> str | None:
    return never(WorkloadSpec.model_validate({"name": "w", "tenant": "t", "jobs": jobs, **more}), FLEET)


SAID = [
    ([_job(8)], None),
    ([_job(9)], "at most 8 fit, in one cluster of east; request at most 8 tasks, "),
    ([_job(9)], "set span_clusters: true (all clusters of east together hold 12) or add machines"),
    ([_job(12, span_clusters=True)], None),
    ([_job(13, span_clusters=True)], "at most 12 fit, in all clusters of east;"),
    ([_job(2, 8, ("v100",))], "at most 1 fit, in one cluster of west"),
    ([_job(1, 8, ("v100",)), _job(60, 0)], None),
    ([_job(8, name="x"), _job(5, name="y")], "east has 12 a100, but 13 are needed"),
    ([_job(8, 1, ("v100",), 2000, name="x"), _job(70, 0, name="y")], "west has 80 CPUs, but 86 are needed"),
]


@pytest.mark.parametrize(("jobs", "said"), SAID)
def test_what_never_fits_is_told_with_figures(jobs: list[JobSpec], said: str | None) -> None:
    """The message has the most tasks that fit, the region and a remedy. If the gang fits, there is no message."""
    found = _never(*jobs)
    assert found is None if said is None else found is not None and said in found, found


def test_regions_that_the_user_excludes_do_not_count() -> None:
    """Machines of excluded regions do not count."""
    assert "at most 0 fit" in str(_never(_job(1), regions_excluded=("east",)))


def test_machines_of_another_kind_of_capacity_do_not_count() -> None:
    """Machines of capacity kinds that the workload does not allow do not count."""
    spot = [replace(machines, capacity="spot") for machines in FLEET]
    spec = WorkloadSpec(name="w", tenant="t", jobs=(_job(8),))
    assert never(spec, spot) is None
    only = spec.model_copy(update={"capacity": (CapacityKind.ON_DEMAND, CapacityKind.VOLUNTARY)})
    said = "no region has machines of the kinds on_demand, voluntary; existing kinds: spot; name one in `capacity`"
    assert never(only, spot) == said
    assert "at most 4 fit" in str(never(only, [*spot[:1], replace(FLEET[1], capacity="on_demand"), *spot[2:]]))


def test_a_machine_that_holds_each_job_alone_is_never_called_impossible() -> None:
    """A random gang that was constructed to fit one cluster is never reported as impossible."""
    chance = random.Random(4)
    for _ in range(300):
        gpus, cpus = chance.randrange(1, 9), chance.randrange(8, 64)
        count = chance.randrange(1, 5)
        fleet = [EqualMachines("r", "c", "a100", gpus, cpus * 1000, 64 * GIB, count), *FLEET]
        each = chance.randrange(1, gpus + 1)
        tasks = count * (gpus // each)
        job = _job(tasks, each, cpus_milli=cpus * 1000 // max(1, gpus // each))
        assert never(WorkloadSpec(name="w", tenant="t", jobs=(job,)), fleet) is None


async def test_submission_tells_it(world: ApiWorld) -> None:
    """A gang that no region can hold is accepted, because machines may be added, and the response has the message."""
    one = {**JOB["resources"], "accelerators": "a100:1"}
    async with world.client("vision") as client:
        fits = (await client.post("/v1/workloads", json=resources(accelerators="a100:8"))).json()
        vain = (await client.post("/v1/workloads", json=job(tasks=17, resources=one))).json()
    assert fits["never"] is None and fits["id"]
    assert vain["phase"] == "pending" and "at most 16 fit, in one cluster of north" in vain["never"]
