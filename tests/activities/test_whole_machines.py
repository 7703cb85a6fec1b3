"""Consolidation on Postgres: which workloads are moved for a gang that waits, and how many in an hour."""

from typing import Any

import pytest
from sqlalchemy import text

import activities.scheduling.whole_machines as live
from domain.phases import Phase
from domain.reasons import ReasonCode
from infra.db.buckets import BucketState, publish_bucket
from infra.db.models import Attempt, Machine
from tests.activities.invariants import check, check_history
from tests.activities.world import World, job

M1, M2 = "r/c/m1", "r/c/m2"


@pytest.fixture
def pieces(world: World) -> World:
    """Two machines of four slots, each with an over-quota workload of one slot that has run for an hour."""
    world.region("r")
    world.machine(M1, 4)
    world.machine(M2, 4)
    world.tenant("poor", 5, 0)
    world.configure(moves_per_h=1)
    fillers = [world.running(job(gpus=3), tenant="poor") for _ in range(2)]
    for name in ("wl-a", "wl-b"):
        world.running(job(gpus=1), tenant="poor", id_=name, ago_s=3600.0)
    for filler in fillers:
        world.release(filler, Phase.SUCCEEDED)
    world.saved("wl-a", 300.0)
    world.saved("wl-b", 60.0)
    assert world.masks(M1)[0].bit_count() == world.masks(M2)[0].bit_count() == 1
    return world


def movers(world: World) -> list[str]:
    """Returns the workloads that were told to move."""
    found = ("wl-a", "wl-b")
    return [w for w in found if any(m["detail"]["code"] == "moved" for m in world.mail(w, "preempt"))]


def test_a_gang_that_waits_gets_the_machine_that_a_workload_leaves(pieces: World) -> None:
    """The workload that loses less continues beside the other; the gang, which may not evict them, is placed then."""
    gang = pieces.submit(job(gpus=4), tenant="poor")
    pieces.tick()
    assert movers(pieces) == ["wl-b"]
    check(pieces)
    here, there = next(iter(pieces.holdings("wl-b", 1))), next(iter(pieces.holdings("wl-a")))
    assert pieces.mail("wl-b", "preempt")[0]["detail"] == {
        "code": "moved", "from": [here], "to": [there], "freed": 1,
    }  # fmt: skip
    pieces.change("wl-b", Phase.CHECKPOINTING)
    pieces.release("wl-b", Phase.PREEMPTED, code=ReasonCode.MOVED)
    assert list(pieces.holdings("wl-b")) == [there]
    pieces.tick()
    assert list(pieces.holdings(gang)) == [here]
    check(pieces)
    check_history(pieces)


def test_no_hour_has_more_moves(pieces: World) -> None:
    """The limit counts moves under way and moves of the last hour, also for a scheduler that has just started."""
    pieces.submit(job(gpus=4), tenant="poor")
    for minutes, expected in ((59, []), (61, ["wl-b"]), (61, ["wl-b"])):
        with pieces.session() as session:
            session.execute(
                text(
                    "update attempt set outcome = jsonb_build_object('code', 'moved'),"
                    " released_at = now() - make_interval(mins => :minutes) where workload = 'wl-0001'"
                ),
                {"minutes": minutes},
            )
        pieces.configure(moves_per_h=1)
        pieces.tick()
        assert movers(pieces) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoint_at": None}, {"started_at": "now() - interval '20 minutes'"}, {"rank": 5},
        {"checkpoint_at": "now() - interval '31 minutes'"}, {"evicting_since": "now()"},
    ],
    ids=lambda changed: "_".join(changed),
)  # fmt: skip
def test_who_is_not_moved(pieces: World, changed: dict[str, Any]) -> None:
    """Work within quota, without a fresh checkpoint, that started lately, or that is being evicted stays."""
    pieces.submit(job(gpus=4), tenant="poor")
    sets = ", ".join(f"{name} = {'null' if value is None else value}" for name, value in changed.items())
    with pieces.session() as session:
        session.execute(text(f"update attempt set {sets} where workload in ('wl-a', 'wl-b') and released_at is null"))
    waiting = [(job(gpus=4).request(("reserved",)),)]
    assert live.consolidate(pieces.engine, pieces.settings.scheduler, waiting) == 0
    assert movers(pieces) == []


def test_off_by_default_and_only_for_gangs_that_need_whole_machines(pieces: World) -> None:
    """Without a limit above 0, or without a refused workload that needs several GPUs of a machine, nobody moves."""
    pieces.tick()
    assert movers(pieces) == []
    pieces.configure(moves_per_h=0)
    pieces.submit(job(gpus=4), tenant="poor")
    pieces.tick()
    assert movers(pieces) == []


def test_a_plan_that_does_not_hold_any_more_moves_nobody(pieces: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the place is cordoned between the search and the booking, nothing changes."""
    plain = live.book

    def late(connection: Any, bookings: Any) -> bool:
        for machine in (M1, M2):
            pieces.alter(Machine, machine, cordon={"code": "x", "detail": {}})
        return plain(connection, bookings)

    monkeypatch.setattr(live, "book", late)
    pieces.submit(job(gpus=4), tenant="poor")
    pieces.tick()
    assert movers(pieces) == []
    with pieces.session() as session:
        assert session.get_one(Attempt, ("wl-b", 1)).evicting_since is None
    check(pieces)


def test_nobody_moves_where_the_bucket_fails(pieces: World) -> None:
    """A workload that stops there could not save. When the bucket answers again, it moves."""
    pieces.submit(job(gpus=4), tenant="poor")
    for failing_since_s, expected in ((1.0, []), (None, ["wl-b"])):
        with pieces.session() as session:
            publish_bucket(session, "r", BucketState("file:///x", failing_since_s=failing_since_s, error="x"))
        waiting = [(job(gpus=4).request(("reserved",)),)]
        live.consolidate(pieces.engine, pieces.settings.scheduler, waiting)
        assert movers(pieces) == expected


def test_what_is_reserved_is_not_taken(pieces: World) -> None:
    """Machines on which a gang has reserved what a protected workload and others will leave take no work that moves."""
    pieces.machine("r/c/m3", 4)
    protected = pieces.running(job(gpus=4), tenant="poor", ago_s=60.0)
    pieces.configure(moves_per_h=1, min_runtime_s=1800.0, reserve_after_s=3600.0)
    gang = pieces.submit(job(tasks=3, gpus=4), level=1)
    pieces.submit(job(gpus=4), tenant="poor")
    pieces.tick()
    assert list(pieces.holdings(protected)) == ["r/c/m3"] and "reserved" in str(pieces.reasons(gang))
    assert movers(pieces) == []
