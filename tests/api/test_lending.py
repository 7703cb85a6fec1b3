"""What a machine gives: the workloads on it, its hours, and why it takes no work."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, update

from domain.lifecycle.credit import Earned
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.db.lent_machines import DAYS, count_given
from infra.db.models import Allocation, Attempt, Machine
from tests.api.calls import get
from tests.api.world import ApiWorld

PATH = "/v1/machines/north/alpha/m1/lending"
DAY = timedelta(days=1)


def _held(world: ApiWorld, workload: str, begun_days: float, ended_days: float | None) -> None:
    """Sets from when to when a workload held its slots, in days before now, on a lent machine."""
    ended = None if ended_days is None else func.now() - ended_days * DAY
    with world.session() as session:
        own = update(Allocation).where(Allocation.workload == workload)
        session.execute(own.values(held_at=func.now() - begun_days * DAY, released_at=ended))
        run = update(Attempt).where(Attempt.workload == workload)
        session.execute(run.values(launch_limit_s=60.0, released_at=None))
        session.execute(run.values(released_at=ended))


def _earns(world: ApiWorld, workload: str, ago_days: float, *, steps: bool = False) -> None:
    """Records evidence of an attempt's work up to some days before now: a checkpoint, or steps of two machines."""
    at_s = (datetime.now(UTC) - ago_days * DAY).timestamp()
    earned = Earned().with_checkpoint(7, at_s)
    if steps:
        earned = Earned().with_steps({"north/alpha/m1": 7, "north/alpha/m2": 7}, None, at_s)
    with world.session() as session:
        session.execute(update(Attempt).where(Attempt.workload == workload).values(earned=earned.to_json()))


async def test_hours_and_workloads(world: ApiWorld) -> None:
    """Hours count each GPU from the award to the last evidence of work, at most to the release; others do not count.

    Without evidence, nothing counts, however long the resources were held. The hours of the last days are those since
    the begin of a day. After the ends were added to the sums, all hours are the same.
    """
    assert (await get(world, PATH, "machine"))["given_since"] is None
    old, recent = (world.add_workload(Phase.SUCCEEDED) for _ in range(2))
    live, hidden = world.add_workload(Phase.RUNNING), world.add_workload(Phase.RUNNING, tenant="speech")
    elsewhere, cpus = world.add_workload(Phase.RUNNING), world.add_workload(Phase.SUCCEEDED)
    for workload, slots in ((old, 0b11), (recent, 0b111), (cpus, 0)):
        world.add_attempt(workload, 1, "north/alpha/m1", slots, released_at=func.now())
    for workload, slots in ((live, 0b1010), (hidden, 0b100)):
        world.add_attempt(workload, 1, "north/alpha/m1", slots)
    world.add_attempt(elsewhere, 1, "north/alpha/m2", 0b1)
    _held(world, old, 50, 29)
    _held(world, recent, 3, 2)
    _held(world, live, 1, None)
    _held(world, hidden, 0, None)
    _held(world, cpus, 9, 8)
    seen = await get(world, PATH, "machine")
    assert (seen["given_gpu_h"], seen["given_gpu_h_30d"]) == (0, 0)
    assert seen["held_gpu_h"] == pytest.approx(24 * (2 * 21 + 3 + 2), abs=0.1)
    _earns(world, old, 0)
    _earns(world, recent, 2.5, steps=True)
    _earns(world, live, 0.25)
    _earns(world, hidden, 5)
    seen = await get(world, PATH, "machine")
    assert seen["given_gpu_h"] == pytest.approx(24 * (2 * 21 + 3 * 0.5 + 2 * 0.75), abs=0.1)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    since_first_day = (datetime.now(UTC) - 29 * DAY - (today - DAYS * DAY)) / DAY
    assert seen["given_gpu_h_30d"] == pytest.approx(24 * (2 * since_first_day + 3 * 0.5 + 2 * 0.75), abs=0.1)
    assert seen["given_since"] is not None
    assert [(one["workload"], one["tenant"], one["slots"]) for one in seen["running"]] == [
        (live, "vision", [1, 3]),
        (hidden, "speech", [2]),
    ]
    with world.session() as session:
        assert count_given(session, 10) == 3
    assert await get(world, PATH, "operator") == {
        **seen,
        "given_gpu_h": pytest.approx(seen["given_gpu_h"], abs=0.1),
        "given_gpu_h_30d": pytest.approx(seen["given_gpu_h_30d"], abs=0.1),
        "held_gpu_h": pytest.approx(seen["held_gpu_h"], abs=0.1),
    }
    own = await get(world, PATH, "speech")
    assert [one["workload"] for one in own["running"]] == [hidden]
    assert live not in str(own)


async def test_what_is_booked_does_not_run_yet(world: ApiWorld) -> None:
    """A workload that is being stopped to grow has booked slots for its next attempt. It is listed once."""
    grows = world.add_workload(Phase.RUNNING)
    world.add_attempt(grows, 1, "north/alpha/m1", 0b1)
    with world.session() as session:
        booked = {"cpus_milli": 0, "memory_bytes": 0, "awaited_cpus_milli": 0, "awaited_memory_bytes": 0}
        session.add(Allocation(workload=grows, attempt=2, machine="north/alpha/m1", slots=0b10, awaited=0b1, **booked))
    seen = await get(world, PATH, "machine")
    assert [(one["workload"], one["attempt"], one["slots"]) for one in seen["running"]] == [(grows, 1, [0])]


async def test_why_it_takes_no_work(world: ApiWorld) -> None:
    """The owner's notice, a cordon, and GPUs that the owner has taken back are shown."""
    assert (await get(world, PATH, "machine"))["takes_work"]
    with world.session() as session:
        session.get_one(Machine, "north/alpha/m1").withheld = 0b11
    seen = await get(world, PATH, "machine")
    assert (seen["slots_withheld"], seen["takes_work"]) == ([0, 1], True)
    told = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": "north/alpha/m1", "platform": "owner"})
    with world.session() as session:
        row = session.get_one(Machine, "north/alpha/m1")
        row.notice = row.cordon = told.to_json()
    seen = await get(world, PATH, "machine")
    assert (seen["takes_work"], seen["notice"]["code"], seen["cordon"]) == (
        False,
        "platform_notice",
        seen["notice"],
    )
    assert (await get(world, "/v1/machines/north/alpha/m1", "machine"))["cordon"] == seen["cordon"]
