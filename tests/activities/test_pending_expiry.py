"""Workloads that wait longer than `max_pending_s` fail; other workloads and held ones do not."""

from sqlalchemy import text

from activities.lifecycle.progress import expire_pending
from domain.phases import Phase
from domain.spec import LimitsSpec
from infra.db.models import Workload
from tests.activities.world import World, job


def test_a_wait_that_is_too_long_ends_once(world: World) -> None:
    """A workload over its limit fails once, with limit and waiting time in its reason, and without a workflow."""
    late, patient, held, without = (
        world.submit(limits=LimitsSpec(max_pending_s=limit_s)) for limit_s in (60.0, 7200.0, 60.0, None)
    )
    for id_ in (late, patient, held, without):
        world.alter(Workload, id_, submitted_at=text("now() - interval '1 hour'"))
    world.alter(Workload, held, held_by="somebody")
    assert expire_pending(world.engine) == [late]
    assert expire_pending(world.engine) == []
    with world.session() as session:
        row = session.get_one(Workload, late)
        assert row.phase == Phase.FAILED and row.finished_at is not None and row.reason is not None
        assert row.reason["code"] == "pending_expired" and row.reason["detail"]["limit_s"] == 60.0
        assert row.reason["detail"]["waited_s"] >= 3600
    assert world.mail(late) == [], "a workload that was never placed has no workflow"
    world.alter(Workload, held, held_by=None, unheld_at=text("now()"))
    assert expire_pending(world.engine) == [], "the time on hold does not count"
    world.alter(Workload, held, unheld_at=text("now() - interval '61 seconds'"))
    assert expire_pending(world.engine) == [held]


def test_a_wait_begins_when_the_workload_comes_back(world: World) -> None:
    """The wait starts again when a workload is queued again; the message names the attempt before the wait."""
    world.region("r")
    world.machine("r/c/m")
    workload = world.submit(job(), limits=LimitsSpec(max_pending_s=60.0))
    world.alter(Workload, workload, submitted_at=text("now() - interval '1 hour'"))
    world.tick()
    world.run(workload)
    assert expire_pending(world.engine) == []
    world.release(workload, Phase.PREEMPTED)
    assert expire_pending(world.engine) == []
    with world.session() as session:
        session.execute(text("update attempt set released_at = now() - interval '61 seconds'"))
    assert expire_pending(world.engine) == [workload]
    assert world.mail(workload, "cancel")[0]["attempt"] == 1
