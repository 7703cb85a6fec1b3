"""Where a workload goes that an owner's machine has lost: P2's scores in the plans of awards."""

from datetime import UTC, datetime, timedelta
from math import exp

import pytest
from sqlalchemy import func

from activities.scheduling.avoided_machines import AVOIDED
from domain.criteria import PlanQuality
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode, in_words
from infra.db.models import Attempt, Cluster, Machine
from infra.db.reclaim import SiteHazard
from infra.db.tenants import Tenant
from tests.activities.world import World, job

C = 1_500_000_000
MBIT = 125_000


@pytest.fixture
def campus(world: World) -> World:
    """A region with the lent buildings `a` (with a store, three machines), `b` and `c`, and reserved machines `z`."""
    world.region("r")
    for machine in ("a/m1", "a/m2", "a/m3", "b/m", "c/m", "z/m"):
        world.machine(f"r/{machine}", 2)
    for cluster in "abc":
        world.alter(Cluster, ("r", cluster), capacity="voluntary")
    world.alter(Cluster, ("r", "a"), store_url="file:///a", link_mbit=400.0)
    world.alter(Cluster, ("r", "b"), link_mbit=100.0)
    world.alter(Cluster, ("r", "c"), link_mbit=200.0)
    return world


IMPOSSIBLE = {
    "negative": (-1, 30.0), "empty": (0, 30.0), "huge": ((1 << 63) - 1, 1e-300), "negative time": (C, -1.0),
}  # fmt: skip


def _leave(world: World, workload: str, *, code: ReasonCode = ReasonCode.PLATFORM_NOTICE, saved: int | None = C) -> str:
    """Lets a workload's first attempt end after it has saved; returns its machine, which is then cordoned."""
    (machine,) = world.holdings(workload)
    world.alter(Attempt, (workload, 1), checkpoint_bytes=saved, checkpoint_write_s=30.0 if saved else None)
    world.alter(Machine, machine, cordon={"code": "x", "detail": {}})
    world.release(workload, Phase.PENDING)
    world.alter(Attempt, (workload, 1), outcome=Reason(code, {"machine": machine}).to_json())
    return machine


def _next(world: World, workload: str) -> tuple[str, PlanQuality]:
    """Awards the next attempt; returns its machine and the quality of its plan."""
    plan = world.offer(workload).bid.plan
    assert plan is not None
    assert world.tick().awarded == 1
    (placed,) = world.holdings(workload, 2)
    assert plan.jobs[0].machines == ((placed, 1),)
    return placed, plan.quality


def _start(world: World, capacity: tuple[str, ...] = ("voluntary",)) -> str:
    """Returns a workload that runs in building `a`."""
    for cluster in "bcz":
        world.alter(Machine, f"r/{cluster}/m", draining=True)
    workload = world.running(job(gpus=2), capacity=capacity)
    for cluster in "bcz":
        world.alter(Machine, f"r/{cluster}/m", draining=False)
    return workload


def test_a_machine_whose_failure_is_not_confirmed_is_avoided_for_an_hour(campus: World) -> None:
    """The next attempt is placed on none of the avoided machines; after an hour, on the same one again."""
    workload = _start(campus)
    left = _leave(campus, workload, code=ReasonCode.UNCONFIRMED_FAILURE, saved=None)
    outcome = Reason(ReasonCode.UNCONFIRMED_FAILURE, {"avoided": [left, "r/b/m"]}).to_json()
    campus.alter(Attempt, (workload, 1), outcome=outcome)
    others = {f"r/a/m{n}" for n in (1, 2, 3)} | {"r/c/m"} - {left}
    campus.alter(Machine, left, cordon=None)
    for machine in others - {left}:
        campus.alter(Machine, machine, draining=True)
    result = campus.tick()
    assert result.awarded == 0 and result.rest_s is not None and result.rest_s <= AVOIDED.total_seconds()
    assert campus.reasons(workload)[-1]["code"] == "machines_avoided"
    released_at = campus.attempt(workload, 1).released_at
    assert released_at is not None
    until = in_words(released_at.timestamp() + AVOIDED.total_seconds())
    assert campus.reasons(workload)[-1]["detail"] == {"region": "r", "machines": [left, "r/b/m"], "until": until}
    other = campus.running(job(gpus=2), capacity=("voluntary",))
    assert campus.holdings(other).keys() == {left}  # Another workload may use it.
    campus.release(other, Phase.SUCCEEDED)
    campus.alter(Attempt, (workload, 1), released_at=datetime.now(UTC) - timedelta(hours=2))
    assert _next(campus, workload)[0] == left


def test_the_same_building_comes_first(campus: World) -> None:
    """Two machines in the building have room, so the gang stays there, although other buildings are more stable."""
    campus.alter(Cluster, ("r", "a"), departures_per_h=1.0)
    workload = _start(campus)
    left = _leave(campus, workload)
    machine, quality = _next(campus, workload)
    assert machine.startswith("r/a/") and machine != left
    assert quality.away == 0


def test_the_building_with_the_least_score(campus: World) -> None:
    """With one other machine in the building, the scores decide; the award has the score of plain arithmetic."""
    campus.alter(Cluster, ("r", "a"), departures_per_h=0.5)
    campus.alter(Cluster, ("r", "b"), departures_per_h=0.1)
    workload = _start(campus)
    _leave(campus, workload)
    campus.alter(Machine, "r/a/m2", draining=True)
    campus.alter(Machine, "r/a/m3", draining=True)
    machine, quality = _next(campus, workload)
    assert machine == "r/c/m"
    upload_s, read_s = 30.0, C / (200 * MBIT)  # The link of `c` is the bottleneck, and its owners never leave.
    assert quality.move_s == pytest.approx(upload_s + read_s + 30, rel=1e-6)
    assert quality.away == 0


@pytest.mark.parametrize(("per_h", "chosen"), [(0.0, "r/c/m"), (2.0, "r/b/m")])
def test_an_unstable_building_pays_for_the_next_migration(campus: World, per_h: float, chosen: str) -> None:
    """Building `c` has the faster link, but not if its owners are likely to take the machine back."""
    campus.alter(Cluster, ("r", "c"), departures_per_h=per_h)
    workload = _start(campus)
    _leave(campus, workload)
    for number in (2, 3):
        campus.alter(Machine, f"r/a/m{number}", draining=True)
    machine, quality = _next(campus, workload)
    assert machine == chosen
    read_s = {name: C / (mbit * MBIT) for name, mbit in (("a", 400), ("b", 100), ("c", 200))}
    # From `c`, the next migration is by way of the region's bucket, to one of two machines in each other building.
    next_s = read_s["c"] + sum(read_s[other] for other in "aabbc") / 5 + 30
    score_s = {name: 30 + read_s[name] + 30 for name in "bc"}
    score_s["c"] += (1 - exp(-per_h * 1200 / 3600)) * next_s
    assert quality.move_s == pytest.approx(min(score_s.values()), rel=1e-6)


def _owners(world: World, **per_h: float) -> None:
    """Sets how often the owners of the machines in building `a` come, in the next hours."""
    machines = {f"r/a/{name}": [rate, rate, 0, 0] for name, rate in per_h.items()}
    with world.session() as session:
        session.add(SiteHazard(region="r", counts={}, lent=[], seen="0-0", machines=machines))


def test_the_machine_whose_owner_comes_most_rarely(campus: World) -> None:
    """Of two machines in the building, whatever their ids. With a hazard of its own, the cluster's does not count."""
    campus.alter(Cluster, ("r", "a"), departures_per_h=5.0)
    campus.machine("r/a/m4", 2)
    _owners(campus, m1=0.9, m2=0.5, m3=0.01, m4=0.7)
    workload = _start(campus)
    _leave(campus, workload)
    machine, quality = _next(campus, workload)
    assert machine == "r/a/m3"
    read_s = {name: C / (mbit * MBIT) for name, mbit in (("a", 400), ("b", 100), ("c", 200))}
    here_s = C / (820 * MBIT)  # The store is in the building.
    next_s = here_s + (here_s + sum(read_s[other] for other in "bbcc")) / 5 + 30
    leaves = 1 - exp(-0.01 * 1200 / 3600)
    assert quality.move_s == pytest.approx(30 + here_s + 30 + leaves * next_s, rel=1e-6)


def test_the_first_gpu_type_comes_before_the_calmest_machine(campus: World) -> None:
    """Machines are compared within the type that the plan prefers."""
    campus.alter(Tenant, "t", quota_gpus={"a100": 1000, "rtx": 1000})
    _owners(campus, m1=0.9, m2=0.5, m3=0.01, m4=0.001)
    for cluster in "bcz":
        campus.alter(Machine, f"r/{cluster}/m", draining=True)
    workload = campus.running(job(gpus=2, types=("a100", "rtx")), capacity=("voluntary",))
    campus.machine("r/a/m4", 2, gpu_type="rtx")
    _leave(campus, workload)
    assert _next(campus, workload)[0] == "r/a/m3"


def test_a_machine_that_is_new_counts_like_its_cluster(campus: World) -> None:
    """Nothing is known about its owner."""
    _owners(campus, m1=0.9, m2=0.5, m3=0.01)
    workload = _start(campus)
    _leave(campus, workload)
    campus.machine("r/a/m0", 2)
    assert _next(campus, workload)[0] == "r/a/m3"


def test_the_calmest_machine_that_is_not_avoided(campus: World) -> None:
    """A machine on which the workload failed is not compared."""
    for name in ("m4", "m5"):
        campus.machine(f"r/a/{name}", 2)
    _owners(campus, m1=0.9, m2=0.8, m3=0.001, m4=0.7, m5=0.01)
    workload = _start(campus)
    left = _leave(campus, workload)
    with campus.session() as session:
        reason = Reason(ReasonCode.UNCONFIRMED_FAILURE, {"avoided": ["r/a/m3"]}).to_json()
        attempt = session.get_one(Attempt, (workload, 1))
        session.add(
            Attempt(
                workload=workload, attempt=-1, region="r", plan=attempt.plan, gpu_types={}, cpus_milli=0,
                outcome=reason, released_at=func.now(),
            )
        )  # fmt: skip
    assert left == "r/a/m1"
    assert _next(campus, workload)[0] == "r/a/m5"


def test_one_machine_is_better_than_four_that_are_a_little_calmer(campus: World) -> None:
    """The departure of any machine of a gang ends it, so their departures are summed."""
    small, large = [f"r/b/m{n}" for n in range(4, 8)], "r/c/large"
    for machine in small:
        campus.machine(machine, 1)
    campus.machine(large, 4)
    for machine in ("r/b/m", "r/c/m", "r/z/m", large, *small):
        campus.alter(Machine, machine, draining=True)
    for cluster in "bc":
        campus.alter(Cluster, ("r", cluster), link_mbit=400.0)
    _owners(campus, m1=9.0, m2=9.0, m3=9.0)
    with campus.session() as session:
        site = session.get_one(SiteHazard, "r")
        site.machines = site.machines | {machine: [0.2, 0.2, 0, 0] for machine in small} | {large: [0.3, 0.3, 0, 0]}
    workload = campus.running(job(tasks=4), capacity=("voluntary",))
    for machine in (large, *small):
        campus.alter(Machine, machine, draining=False)
    for machine in ("r/a/m1", "r/a/m2", "r/a/m3"):
        campus.alter(Machine, machine, draining=True)
    campus.alter(Attempt, (workload, 1), checkpoint_bytes=C, checkpoint_write_s=30.0)
    campus.release(workload, Phase.PENDING)
    notice = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": "r/a/m1"}).to_json()
    campus.alter(Attempt, (workload, 1), outcome=notice)
    assert campus.tick().awarded == 1
    assert list(campus.holdings(workload, 2)) == [large]


def test_workloads_that_leave_together_share_the_calm_machines(campus: World) -> None:
    """Each gets the calmest machine that those before it in the queue leave."""
    for name in ("m4", "m5", "m6"):
        campus.machine(f"r/a/{name}", 2)
    _owners(campus, m1=0.9, m2=0.8, m3=0.5, m4=0.02, m5=0.3, m6=0.01)
    for cluster in "bcz":
        campus.alter(Machine, f"r/{cluster}/m", draining=True)
    first, second = (campus.running(job(gpus=2), capacity=("voluntary",)) for _ in range(2))
    assert [list(campus.holdings(one)) for one in (first, second)] == [["r/a/m1"], ["r/a/m2"]]
    for one in (first, second):
        _leave(campus, one)
    assert campus.tick().awarded == 2
    assert [list(campus.holdings(one, 2)) for one in (first, second)] == [["r/a/m6"], ["r/a/m4"]]


@pytest.mark.parametrize("case", ["evicted", "nothing saved", "reserved first"])
def test_other_workloads_are_placed_as_before(campus: World, case: str) -> None:
    """An evicted workload, and one without a checkpoint, has no scores; the document's kinds come before the scores."""
    kinds = ("reserved", "voluntary") if case == "reserved first" else ("voluntary",)
    campus.alter(Cluster, ("r", "a"), departures_per_h=1.0)
    workload = _start(campus, kinds)
    _leave(
        campus, workload, saved=None if case == "nothing saved" else C,
        code=ReasonCode.EVICTED if case == "evicted" else ReasonCode.MACHINE_LOST,
    )  # fmt: skip
    machine, quality = _next(campus, workload)
    if case == "reserved first":
        assert machine == "r/z/m" and quality.move_s > 0
    else:
        assert machine == "r/b/m", "the fewest departures, then the id"
        assert (quality.away, quality.move_s) == (0, 0)


@pytest.mark.parametrize("reported", IMPOSSIBLE.values(), ids=list(IMPOSSIBLE))
def test_impossible_reports_of_a_task(campus: World, reported: tuple[int, float]) -> None:
    """A task that reports an impossible size or time does not end the pass: it and other workloads are placed."""
    workload = _start(campus)
    _leave(campus, workload)
    campus.alter(Attempt, (workload, 1), checkpoint_bytes=reported[0], checkpoint_write_s=reported[1])
    other = campus.submit(job(gpus=2), capacity=("voluntary",))
    assert campus.tick().awarded == 2
    assert campus.holdings(workload, 2) and campus.holdings(other)


def test_each_job_needs_room_for_itself(campus: World) -> None:
    """In one pass, a small job stays where two machines have room for it, and a large one leaves: one has. A cluster of
    the same name in another region is another building.
    """
    campus.region("s")
    campus.machine("s/a/m", 2)
    campus.alter(Cluster, ("s", "a"), capacity="voluntary")
    campus.machine("r/a/m4", 2)
    campus.machine("r/a/narrow", 2, memory_bytes=1 << 30)
    for machine in ("r/b/m", "r/c/m", "r/z/m", "s/a/m", "r/a/narrow"):
        campus.alter(Machine, machine, draining=True)
    small = campus.running(job(gpus=2), capacity=("voluntary",))
    large = campus.running(job(gpus=2, memory_bytes=2 << 30), capacity=("voluntary",))
    for machine in ("r/b/m", "r/c/m", "s/a/m", "r/a/narrow"):
        campus.alter(Machine, machine, draining=False)
    campus.alter(Cluster, ("r", "a"), departures_per_h=1.0)
    for workload in (small, large):
        _leave(campus, workload)
    free = {f"r/a/m{number}" for number in range(1, 5)} - campus.holdings(small).keys() - campus.holdings(large).keys()
    campus.alter(Machine, max(free), draining=True)
    assert campus.tick().awarded == 2
    (of_small,), (of_large,) = campus.holdings(small, 2), campus.holdings(large, 2)
    assert of_small.startswith("r/a/")
    assert not of_large.startswith("r/a/")
