"""Reads a region's lent machines, their departures and the jobs on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import cast, func, select, text, update
from sqlalchemy.dialects.postgresql import BIT
from sqlalchemy.orm import Session

from domain.capacity import CapacityKind
from domain.phases import Phase
from domain.task_reports import LEAST_WRITE_S, OWNER, BandwidthReport, stall_of, typical_save
from infra.db.events import Cursor
from infra.db.models import Allocation, Attempt, Cluster, Machine, Workload

EMERGENCY_S = 10.0
"""A notice shorter than this is an emergency departure (II-A: the shortest notice of the deployment is 10 s)."""
GPU_BYTES = 288_000_000_000
"""No GPU has more memory. The sizes of a machine's GPUs are not stored."""
_GPUS = func.bit_count(cast(Allocation.slots, BIT(64)))
_DEPARTURES = text(
    "select e.machine, extract(epoch from e.at)::float8, e.kind = 'machine.lost' or coalesce("
    "     (e.reason -> 'detail' ->> 'ends_at_s')::float8 - (e.reason -> 'detail' ->> 'at_s')::float8 < :emergency_s,"
    "     false)"
    " from event as e join machine as m on m.id = e.machine"
    " where (e.txid, e.id) > (:txid, :id) and e.txid < :until_txid and e.region = :region"
    " and (e.kind = 'machine.notice' and e.reason -> 'detail' ->> 'platform' = :owner"
    "      or e.kind = 'machine.lost' and m.notice is null)"
    " order by e.txid, e.id"
)


@dataclass(frozen=True)
class LentMachine:
    """A machine of a voluntary cluster."""

    id: str
    cluster: str
    lent: bool
    """Whether it is ready, and its owner has not taken it back."""


@dataclass(frozen=True)
class RunningJob:
    """An attempt with tasks on lent machines, and what its saves write."""

    workload: str
    attempt: int
    machines: tuple[str, ...]
    """All its machines: any of its tasks may be the one that saves."""
    lent: tuple[str, ...]
    """The machines among them that owners lend, and may take back."""
    save_bytes: int
    """What a save writes, at most what its memory and that of its GPUs can hold."""
    write_s: float
    """How long that takes until it is durable."""
    stall_s: float
    """For how long it stalls the training."""
    store: tuple[str, str | None] = ("", None)
    """Its region, and the URL of the store of its cluster; None: the bucket of the region."""
    bandwidth: BandwidthReport | None = None
    """The lowest bandwidth that its machines have measured; None: not measured."""

    @property
    def run(self) -> str:
        """The attempt's key `workload.attempt`."""
        return f"{self.workload}.{self.attempt}"


def read_now_s(session: Session) -> float:
    """Returns the time in seconds since the epoch."""
    return float(session.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())


def read_machines(session: Session) -> dict[str, list[LentMachine]]:
    """Returns the machines of voluntary clusters, by region, each region's sorted by id."""
    rows = session.execute(
        select(Machine.id, Machine.region, Machine.cluster, Machine.state, Machine.notice)
        .join(Cluster, (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster))
        .where(Cluster.capacity == CapacityKind.VOLUNTARY.value)
        .order_by(Machine.id)
    )
    found: dict[str, list[LentMachine]] = {}
    for id_, region, cluster, state, notice in rows:
        found.setdefault(region, []).append(LentMachine(id_, cluster, state == "ready" and notice is None))
    return found


class OwnerCame(NamedTuple):
    """A departure of a lent machine."""

    machine: str
    at_s: float
    """When the owner gave notice, or the machine was lost."""
    is_emergency: bool
    """Whether the notice was shorter than `EMERGENCY_S`, or there was none."""


def read_departures(session: Session, region: str, after: Cursor, until: Cursor) -> list[OwnerCame]:
    """Returns the departures of a region's machines between two positions of the event log.

    These are the owners' notices, and losses without any notice. No event becomes visible below a position after it was
    one (`infra.db.events.position`).
    """
    values = {
        "region": region, "txid": after.txid, "id": after.id, "until_txid": until.txid + 1, "owner": OWNER,
        "emergency_s": EMERGENCY_S,
    }  # fmt: skip
    return [OwnerCame(*row) for row in session.execute(_DEPARTURES, values).all()]


def forget_departures(session: Session) -> None:
    """Clears what was learned about clusters that are not lent by owners any more."""
    other = Cluster.capacity != CapacityKind.VOLUNTARY.value, Cluster.departures_per_h != 0
    session.execute(update(Cluster).where(*other).values(departures_per_h=0.0))


def read_jobs(session: Session, machines: Sequence[str]) -> list[RunningJob]:
    """Returns the jobs that run on any of these lent machines and have saved a checkpoint, by workload.

    The reports of tasks and of volunteers' agents are not trusted. A job with an impossible size or time is left out,
    so that the other jobs still get their intervals. A size counts at most up to the memory of the job, because larger
    checkpoints get a larger share of the site's bandwidth.
    """
    known = set(machines)
    rows: Sequence[Any] = session.execute(
        select(
            Attempt.workload,
            Attempt.attempt,
            func.array_agg(Allocation.machine),
            func.sum(Allocation.memory_bytes + _GPUS * GPU_BYTES),
            Attempt.checkpoint_bytes,
            Attempt.checkpoint_write_s,
            Attempt.checkpoint_s,
            Attempt.cadence,
            Attempt.saves,
            Attempt.region,
            Attempt.store_url,
            Attempt.bandwidth,
        )
        .join(Workload, (Workload.id == Attempt.workload) & (Workload.attempt == Attempt.attempt))
        .join(Allocation, (Allocation.workload == Attempt.workload) & (Allocation.attempt == Attempt.attempt))
        .where(
            Workload.phase == Phase.RUNNING.value,
            Allocation.released_at.is_(None),
            Attempt.checkpoint_bytes > 0,
            Attempt.checkpoint_write_s >= LEAST_WRITE_S,
            Attempt.checkpoint_write_s < math.inf,
        )
        .group_by(Attempt.workload, Attempt.attempt)
        .having(func.bool_or(Allocation.machine.in_(machines)))
        .order_by(Attempt.workload)
    ).all()
    return [
        RunningJob(
            workload,
            attempt,
            tuple(sorted(held)),
            tuple(sorted(known & set(held))),
            *typical_save(saves or (), size_bytes, write_s, int(memory_bytes), stall_of(cadence, checkpoint_s)),
            (region, store_url),
            None if bandwidth is None else BandwidthReport(**bandwidth),
        )
        for (
            workload,
            attempt,
            held,
            memory_bytes,
            size_bytes,
            write_s,
            checkpoint_s,
            cadence,
            saves,
            region,
            store_url,
            bandwidth,
        ) in rows
    ]
