"""What becomes possible by time alone: the pass says when the next one is due, and the reason names the time."""

from datetime import timedelta

import pytest
from sqlalchemy import text

from domain.phases import Phase
from domain.reasons import in_words
from infra.db.models import Workload
from tests.activities.world import World, job
from tests.agent.harness import until

# A pass is also due when the queue may be published again, which is not the subject here.
pytestmark = pytest.mark.usefixtures("publishes_every_scan")


def _protected(world: World, min_runtime_s: float) -> tuple[str, str]:
    """Returns a workload of low priority that has just started and holds the whole region, and the end of its
    protection.
    """
    world.configure(min_runtime_s=min_runtime_s)
    world.region("r")
    world.machine("r/c/m", gpus=4)
    low = world.running(job(tasks=2, gpus=2), ago_s=0.0)
    world.alter(Workload, low, level=6)
    started_at = world.attempt(low).started_at
    assert started_at is not None
    return low, in_words(started_at.timestamp() + min_runtime_s)


def test_the_end_of_a_protection_is_named_and_starts_a_pass(world: World) -> None:
    """An urgent gang waits for the end of its victim's minimum runtime: the next pass is due then, and evicts."""
    low, until = _protected(world, 1000.0)
    urgent, behind = world.submit(job(tasks=2, gpus=2)), world.submit(job(tasks=2, gpus=2))
    result = world.tick()
    assert result.awarded == 0 and result.rest_s is not None and 0 < result.rest_s <= 1000.0
    for workload, code in ((urgent, "insufficient_capacity r"), (behind, "refused_like r")):
        assert world.waiting(workload) == [code]
        assert world.reasons(workload)[0]["detail"]["protected_until"] == until
        assert until in world.reasons(workload)[0]["sentence"]
    world.run(low, ago_s=1000.0)
    assert world.tick().awarded == 1 and {v for _, _, v, _ in world.evictions()} == {low}


@pytest.mark.parametrize("reads_anew", [False, True])
def test_what_is_free_is_withheld_from_worse_ranks_until_the_gang_is_placed(world: World, reads_anew: bool) -> None:
    """While an urgent gang waits for the end of a protection, free slots are reserved for it: a later workload of worse
    rank does not get them, and a workload of its own rank does.

    The reservation outlives a full read of the scheduler's state, and the protection is not extended when tasks start.
    """
    world.configure(min_runtime_s=1000.0, reserve_after_s=3600.0)
    world.region("r")
    world.machine("r/c/m", gpus=4)
    low = world.running(job(gpus=2), ago_s=0.0)
    world.alter(Workload, low, level=6)
    urgent, filler = world.submit(job(tasks=2, gpus=2)), world.submit(job(gpus=1))
    world.alter(Workload, filler, level=6)
    assert world.tick().awarded == 0
    assert world.waiting(urgent)[0] == "reserved r"
    assert world.waiting(filler) == ["insufficient_capacity r"]
    if reads_anew:
        with pytest.raises(RuntimeError), world.scheduler_state.current():
            raise RuntimeError
    world.run(low, ago_s=1000.0)
    assert world.tick().awarded == 1 and {v for _, _, v, _ in world.evictions()} == {low}


@pytest.mark.parametrize("reads_anew", [False, True])
def test_protection_is_not_extended_when_reserved_tasks_start(world: World, reads_anew: bool) -> None:
    """A victim whose tasks start after the reservation, shortly before the end of its protection, is evicted then."""
    world.configure(min_runtime_s=1000.0, reserve_after_s=3600.0)
    world.region("r")
    world.machine("r/c/m", gpus=4)
    low = world.running(job(tasks=2, gpus=2), ago_s=0.0)
    world.alter(Workload, low, level=6)
    with world.session() as session:
        session.execute(text("update attempt set started_at = null, awarded_at = now() - interval '997 seconds'"))
    urgent = world.submit(job(tasks=2, gpus=2))
    assert world.tick().awarded == 0 and world.waiting(urgent)[0] == "reserved r"
    world.run(low, ago_s=0.0)
    if reads_anew:
        with pytest.raises(RuntimeError), world.scheduler_state.current():
            raise RuntimeError
    until(lambda: world.tick().awarded == 1)  # The protection that the victim had at the reservation ends.
    assert {v for _, _, v, _ in world.evictions()} == {low}


@pytest.mark.parametrize("held_gpus", [0, 2])
def test_a_workload_that_waits_for_its_victim_has_no_protection_yet(world: World, held_gpus: int) -> None:
    """A workload of worse rank waits for its victim when a gang reserves its slots: it is evicted once it holds them.

    So in the simulator, whether or not the workload holds a part of its slots already.
    """
    world.configure(min_runtime_s=1000.0, reserve_after_s=3600.0)
    world.region("r")
    world.machine("r/c/m", gpus=4)
    low = world.running(job(gpus=4 - held_gpus), ago_s=2000.0)
    world.alter(Workload, low, level=7)
    middle = world.submit(job(gpus=4))
    world.alter(Workload, middle, level=6)
    assert world.tick().awarded == 1 and world.holdings(middle)["r/c/m"][0].bit_count() == held_gpus
    urgent = world.submit(job(gpus=4))
    assert world.tick().awarded == 0 and world.waiting(urgent)[0] == "reserved_open r"
    world.release(low, Phase.PREEMPTED)
    assert world.tick().awarded == 1 and {v for _, _, v, _ in world.evictions()} == {low, middle}


@pytest.mark.parametrize("case", ["equal priority", "other hardware", "being evicted"])
def test_a_protection_that_does_not_matter_starts_no_pass(world: World, case: str) -> None:
    """The end of a protection starts no pass, and is not named, if the gang could not evict that workload anyway."""
    low, _ = _protected(world, 1000.0)
    world.machine("r/d/m", gpus=1, gpu_type="h100")
    types = ("h100",) if case == "other hardware" else ("a100",)
    if case == "equal priority":
        world.alter(Workload, low, level=None)
    elif case == "being evicted":
        with world.session() as session:
            session.execute(text("update attempt set evicting_since = now() where workload = :w"), {"w": low})
    else:
        world.running(job(gpus=1, types=types), ago_s=2000.0)
    workload = world.submit(job(gpus=1, types=types))
    assert world.tick().rest_s is None
    assert "protected_until" not in world.reasons(workload)[0]["detail"]


def test_a_pass_is_due_when_a_gang_has_waited_long_enough_to_reserve(world: World) -> None:
    """The next pass is due when the oldest gang may reserve: for ends that are not known only after a day. A gang that
    could never fit causes none.
    """
    world.configure(reserve_after_s=3600.0)
    world.region("r")
    world.machine("r/c/m", gpus=4)
    world.running(job(gpus=2), limits=None)
    nowhere = world.submit(job(tasks=2, gpus=4))
    world.alter(Workload, nowhere, submitted_at=text("now() - interval '3000 seconds'"))
    assert world.tick().rest_s is None
    gangs = [world.submit(job(tasks=2, gpus=2)) for _ in range(2)]
    world.alter(Workload, gangs[1], submitted_at=text("now() - interval '3000 seconds'"))
    result = world.tick()
    assert result.rest_s is not None and 0 < result.rest_s <= timedelta(minutes=10).total_seconds()
    world.alter(Workload, gangs[0], submitted_at=text("now() - interval '3600 seconds'"))
    world.alter(Workload, gangs[1], submitted_at=text("now() - interval '86000 seconds'"))
    rest_s = world.tick().rest_s
    assert rest_s is not None and 0 < rest_s <= 400
    world.alter(Workload, gangs[1], submitted_at=text("now() - interval '86400 seconds'"))
    assert world.tick().rest_s is None, "the region has a reservation now"
    assert world.waiting(gangs[1])[0] == "reserved_open r"


def test_the_time_on_hold_gives_no_credit_and_no_reservation(world: World) -> None:
    """A gang that was on hold for six of its seven days counts like one that was submitted a day ago."""
    world.configure(reserve_after_s=2 * 86400.0)
    world.region("r")
    world.machine("r/c/m", gpus=1)
    world.running(job(gpus=1))
    placeholder, other = world.submit(job(gpus=1)), world.submit(job(gpus=1))
    week, day = (text(f"now() - interval '{days} days'") for days in (7, 1))
    world.alter(Workload, placeholder, submitted_at=week, held_by="somebody", held_at=text("now()"))
    world.alter(Workload, other, submitted_at=day)
    world.tick()
    world.alter(Workload, placeholder, held_by=None, held_at=None, paused_s=6 * 86400.0)
    world.tick()
    with world.scheduler_state.current() as state:
        ranked = {one.id: one for one in state.queue.scan(state.now_s).result().queue}
    assert ranked[placeholder].credit == pytest.approx(ranked[other].credit, abs=0.1)
    assert world.waiting(placeholder)[0] != "reserved_open r" != world.waiting(other)[0]
