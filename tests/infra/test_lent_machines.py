"""The GPU hours of lent machines, compared with a recount of all attempts, by minutes."""

import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, delete, func, insert, select, text, update

from domain.lifecycle.credit import Earned
from domain.reasons import Reason, ReasonCode
from infra.db.lent_machines import DAYS, GivenDay, GivenPending, count_given, forget_days, given_by
from infra.db.models import Allocation, Attempt, Region, Workload
from infra.db.session import transaction
from infra.db.tenants import Tenant

_MACHINES = [f"r/lab/m{number}" for number in range(3)]
_MINUTE = timedelta(minutes=1)
_TAKEN = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": _MACHINES[0], "platform": "owner"}).to_json()


@dataclass(frozen=True)
class _Held:
    """What an attempt held on one machine, and until when other evidence confirms it."""

    workload: str
    machine: str
    gpus: int
    begun_at: datetime
    ended_at: datetime | None
    earned_at: datetime | None
    is_lent: bool
    is_reclaimed: bool


def _drawn(chance: random.Random, now: datetime, workload: str) -> list[_Held]:
    begun_at = now - timedelta(minutes=chance.randrange(100, 60 * 24 * 50))
    ended_at = min(now, begun_at + timedelta(minutes=chance.randrange(1, 60 * 24 * 4)))
    last = None if chance.random() < 0.2 else ended_at
    machines = chance.sample(_MACHINES, chance.randrange(1, 3))
    is_lent, is_reclaimed = chance.random() < 0.8, last is not None and chance.random() < 0.3
    checkpoint = None if chance.random() < 0.3 else begun_at + timedelta(minutes=chance.randrange(-9, 60 * 24 * 3))
    return [
        _Held(workload, machine, chance.choice((0, 1, 4)), begun_at, last, checkpoint, is_lent, is_reclaimed)
        for machine in machines
    ]


def _write(database: Engine, runs: list[list[_Held]]) -> None:
    """Inserts attempts that hold machines, then releases those that have an end, by an update as in the product."""
    with transaction(database) as session:
        session.execute(text("alter table allocation disable trigger user"))  # There are no machines.
        session.add(Region(name="r", bucket_url="file:///x"))
        session.add(Tenant(name="t", level=3))
        session.flush()
        for held in runs:
            one = held[0]
            earned = None if one.earned_at is None else Earned().with_checkpoint(7, one.earned_at.timestamp())
            session.add(Workload(id=one.workload, tenant="t", name="w", spec={}, phase="running"))
            session.flush()
            session.add(
                Attempt(
                    workload=one.workload, attempt=1, region="r", plan={"jobs": []}, gpu_types={}, cpus_milli=0,
                    launch_limit_s=60.0 if one.is_lent else None, earned=earned and earned.to_json(),
                    outcome=_TAKEN if one.is_reclaimed else None,
                )
            )  # fmt: skip
            session.flush()
            session.execute(insert(Allocation), [_allocation(own) for own in held])
        for held in runs:
            if held[0].ended_at is not None:
                for table in (Allocation, Attempt):
                    mine: Any = update(table).where(table.workload == held[0].workload)
                    session.execute(mine.values(released_at=held[0].ended_at))
        session.execute(text("alter table allocation enable trigger user"))


def _allocation(held: _Held) -> dict[str, Any]:
    nothing = dict.fromkeys(("awaited", "cpus_milli", "awaited_cpus_milli", "memory_bytes", "awaited_memory_bytes"), 0)
    return {
        "workload": held.workload, "attempt": 1, "machine": held.machine, "slots": (1 << held.gpus) - 1,
        "held_at": held.begun_at, "released_at": None, **nothing,
    }  # fmt: skip


def _recount(runs: list[list[_Held]], now: datetime) -> dict[str, list[Any]]:
    """Returns held GPU hours, given ones, those of the last days, the first time, and reclaims, by machine."""
    first = datetime.combine(now.date() - timedelta(days=DAYS), time(), UTC)
    out: dict[str, list[Any]] = defaultdict(lambda: [0.0, 0.0, 0.0, now, 0])
    for held in (one for run in runs for one in run if one.is_lent):
        sums = out[held.machine]
        end = held.ended_at or now
        at = held.begun_at
        while at < end:
            sums[0] += held.gpus / 60
            if held.earned_at is not None and at < held.earned_at:
                sums[1] += held.gpus / 60
                sums[2] += held.gpus / 60 if at >= first else 0.0
            at += _MINUTE
        sums[3] = min(sums[3], held.begun_at)
        sums[4] += held.is_reclaimed
    return out


def _found(database: Engine) -> dict[str, list[Any]]:
    with transaction(database) as session:
        return {
            machine: [one.held_gpu_h, one.given_gpu_h, one.given_gpu_h_30d, one.since, one.reclaimed]
            for machine, one in given_by(session, _MACHINES).items()
        }


def _is(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    assert found.keys() == wanted.keys()
    for machine, sums in wanted.items():
        # Attempts that still run go on while the test runs.
        assert found[machine][:3] == pytest.approx(sums[:3], abs=0.6), machine
        assert found[machine][3:] == sums[3:], machine


def _now(database: Engine) -> datetime:
    """Returns a full minute, before the transactions that follow."""
    with transaction(database) as session:
        now: datetime = session.execute(select(func.now())).scalar_one()
    return now.replace(second=0, microsecond=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_sums_are_a_recount(database: Engine, seed: int) -> None:
    """They are the same at each step of counting by two at once, and after the deletion of the workloads counted."""
    chance = random.Random(seed)
    now = _now(database)
    runs = [_drawn(chance, now, f"w{number}") for number in range(25)]
    _write(database, runs)
    wanted = _recount(runs, now)
    _is(_found(database), wanted)

    def count(most: int) -> int:
        with transaction(database) as session:
            return count_given(session, most)

    with ThreadPoolExecutor(4) as threads:
        for most in (1, 3, 100):
            list(threads.map(count, [most] * 4))
            _is(_found(database), wanted)
    with transaction(database) as session:
        pending = set(session.scalars(select(GivenPending.workload)))
        ended = [run[0].workload for run in runs if run[0].ended_at is not None and run[0].workload not in pending]
        session.execute(delete(Workload).where(Workload.id.in_(ended)))
        forget_days(session)
    _is(_found(database), wanted)
    with transaction(database) as session:
        assert session.scalar(select(func.count()).where(GivenDay.day < now.date() - timedelta(days=DAYS))) == 0


def test_evidence_that_comes_after_the_end_counts(database: Engine) -> None:
    """An allocation is added to the sums only when its evidence cannot change any more."""
    now = _now(database)
    held = _Held("w", _MACHINES[0], 4, now - timedelta(hours=5), now - timedelta(minutes=50), None, True, False)
    _write(database, [[held]])
    with transaction(database) as session:
        assert count_given(session, 10) == 0
        earned = Earned().with_checkpoint(9, (now - timedelta(hours=2)).timestamp()).to_json()
        session.execute(update(Attempt).values(earned=earned))
    late = replace(held, earned_at=now - timedelta(hours=2))
    _is(_found(database), _recount([[late]], now))
    with transaction(database) as session:
        session.execute(update(GivenPending).values(ended_at=now - timedelta(hours=2)))
        assert count_given(session, 10) == 1
        assert count_given(session, 10) == 0
        session.execute(delete(Workload))
    _is(_found(database), _recount([[late]], now))
