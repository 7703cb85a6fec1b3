"""Dry runs: what the scheduler would do with a workload now."""

from domain.protocol.scheduling import DryRunRequest
from domain.spec import LimitsSpec, WorkloadSpec
from tests.activities.world import GIB, World, job


def test_a_dry_run_tells_and_writes_nothing(world: World) -> None:
    """A dry run returns the region, machines and victims of a workload, or its reasons, and writes nothing."""
    world.region("r")
    world.machine("r/c/m", gpus=2)
    world.tenant("high", level=1)
    low = world.running(job(gpus=2))
    spec = WorkloadSpec(name="x", tenant="high", jobs=(job(gpus=2),))
    before = world.dump()
    told = world.auction.dry_run(DryRunRequest(spec.model_dump(mode="json")))
    assert (told.admitted, told.rank, told.over_quota, told.region) == (True, 1, False, "r")
    assert (told.machines, told.victims, told.reasons) == (["r/c/m"], [low], [])
    poor = spec.model_copy(update={"tenant": "t", "jobs": (job(gpus=4), job("b", gpus=0, memory_bytes=65 * GIB))})
    told = world.auction.dry_run(DryRunRequest(poor.model_dump(mode="json")))
    assert not told.admitted and told.region is None
    assert {r["code"] for r in told.reasons} == {"no_hardware"}
    assert world.dump() == before


def test_a_dry_run_leaves_what_is_reserved_and_silent_regions_alone(world: World) -> None:
    """A dry run gives the auction's result: it uses neither reserved machines nor silent regions."""
    world.configure(reserve_after_s=0.0)
    world.region("r")
    world.region("s")
    world.machine("r/c/m1", gpus=4)
    world.machine("r/c/m2", gpus=4)
    world.running(job(gpus=4), limits=LimitsSpec(max_runtime_s=7200.0))
    reserved = world.submit(job(tasks=2, gpus=4))
    world.tick()
    assert world.waiting(reserved)[0] == "reserved r"
    spec = WorkloadSpec(name="x", tenant="t", jobs=(job(gpus=4),))
    told = world.auction.dry_run(DryRunRequest(spec.model_dump(mode="json")))
    assert not told.admitted and {r["code"] for r in told.reasons} == {"insufficient_capacity", "no_hardware"}
    late = world.submit(job(gpus=4))
    world.tick()
    assert world.workload(late).region is None, "as the dry run said"
    world.award(world.bid("s"), "s")
    told = world.auction.dry_run(DryRunRequest(spec.model_dump(mode="json")))
    assert {r["code"] for r in told.reasons} == {"insufficient_capacity", "region_silent"}
