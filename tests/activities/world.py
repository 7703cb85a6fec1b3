"""A small installation for the activity tests: a real database, folders as buckets, and the activities as methods."""

import base64
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, select, text, update
from sqlalchemy.orm import Session

from activities.lifecycle.launch import LaunchActivities
from activities.lifecycle.machines import MachineActivities
from activities.lifecycle.workloads import WorkloadActivities
from activities.scheduling import awards
from activities.scheduling.auction import AuctionActivities
from activities.scheduling.bids import RegionActivities, asked, region_bid
from activities.scheduling.bookings import PlannedBooking, book
from activities.scheduling.scheduler_state import SchedulerState
from domain.criteria import PlanQuality
from domain.phases import Phase
from domain.protocol.machines import Attend, Hello, Welcome
from domain.protocol.scheduling import AwardRequest, AwardResult, BidRequest, ScanTicket
from domain.protocol.workloads import ReleaseRequest, TransitionRequest
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid, JobPlacement, Plan
from domain.spec import JobSpec, LimitsSpec, ResourceSpec, WorkloadSpec
from domain.task_reports import TaskProgress
from infra.config.scheduling import LifecycleSettings, SchedulerSettings
from infra.config.settings import Settings
from infra.copies import open_copy_store
from infra.db import events, outbox
from infra.db.array_rows import insert_array
from infra.db.base import Base
from infra.db.logs import Outbox, Waiting
from infra.db.models import Allocation, Attempt, Eviction, Machine, Region, Workload
from infra.db.schema import SCHEMA
from infra.db.session import transaction
from infra.db.tables import Partition, Replica, Table
from infra.db.tenants import Tenant
from mizzen.objects.store import ObjectStore

GIB = 1 << 30
WHY = {
    Phase.PENDING: ReasonCode.MACHINE_LOST,
    Phase.PREEMPTED: ReasonCode.EVICTED,
    Phase.SUCCEEDED: ReasonCode.COMPLETED,
    Phase.FAILED: ReasonCode.RETRIES_EXHAUSTED,
    Phase.CANCELLED: ReasonCode.CANCELLED_BY_USER,
}


def job(
    name: str = "main",
    tasks: int = 1,
    gpus: int = 1,
    types: tuple[str, ...] = ("a100",),
    cpus_milli: int = 100,
    memory_bytes: int = 1 << 20,
    **more: Any,
) -> JobSpec:
    """Returns a job with this many tasks and GPUs for each task."""
    resources = ResourceSpec(
        gpus=gpus, gpu_types=types if gpus else (), cpus_milli=cpus_milli, memory_bytes=memory_bytes
    )
    return JobSpec(name=name, role=name, tasks=tasks, resources=resources, argv=more.pop("argv", ("true",)), **more)


class StalePlan(Exception):
    """The facts of a plan have changed since its bid."""


@dataclass(frozen=True)
class Offer:
    """The best bid of all regions for a workload, ready to be awarded."""

    bid: Bid
    candidate: awards.PlannedAward


def key(name: str = "") -> str:
    """Returns a public key that belongs to a name."""
    return base64.b64encode(hashlib.sha256(name.encode()).digest()).decode()


class World:
    """The installation. All clocks are Postgres's; tests write past times instead of waiting."""

    def __init__(self, engine: Engine, folder: Path, prefix: str = "wl") -> None:
        self.engine = engine
        self.folder = folder
        self.settings = Settings(
            data_dir=folder,
            scheduler=SchedulerSettings(min_runtime_s=0, reserve_after_s=inf),
            lifecycle=LifecycleSettings(cordon_after_failed_gangs=2),
        )
        self.prefix = prefix
        self._numbers = itertools.count(1)
        self.configure()

    def configure(self, **scheduler: Any) -> None:
        """Creates the activities again with changed scheduler settings."""
        changed = self.settings.scheduler.model_copy(update=scheduler)
        self.settings = self.settings.model_copy(update={"scheduler": changed})
        self.workloads = WorkloadActivities(self.engine, self.settings)
        self.scheduler_state = SchedulerState(self.engine, self.settings.scheduler)
        self.auction = AuctionActivities(self.engine, self.settings, self.scheduler_state)
        self.regions = RegionActivities(self.engine, self.scheduler_state)
        self.machines = MachineActivities(self.engine, self.settings)
        self.launch = LaunchActivities(self.engine, self.settings)

    def session(self) -> Any:
        """Returns a session in one transaction."""
        return transaction(self.engine)

    # ---------------------------------------------------------------------------------------------------- objects

    def tenant(self, name: str = "t", level: int = 3, gpus: int = 1000, gpu_type: str = "a100") -> None:
        """Adds a tenant with a quota of one GPU type."""
        with self.session() as session:
            session.add(Tenant(name=name, level=level, quota_gpus={gpu_type: gpus}))

    def region(self, name: str) -> ObjectStore:
        """Adds a region with its own bucket; returns the bucket."""
        url = f"file://{self.folder / 'buckets' / name}"
        with self.session() as session:
            session.add(Region(name=name, bucket_url=url))
        return open_copy_store(url)

    def bucket(self, region: str) -> ObjectStore:
        """Returns a region's bucket."""
        with self.session() as session:
            return open_copy_store(session.get_one(Region, region).bucket_url)

    def hello(self, machine: str, gpus: int = 4, **more: Any) -> Hello:
        """Returns the registration that an agent sends at its start."""
        region, cluster, _ = machine.split("/")
        fields: dict[str, Any] = {
            "machine": machine, "region": region, "cluster": cluster, "rack": "k", "gpu_type": "a100", "gpus": gpus,
            "cpus_milli": 16_000, "memory_bytes": 64 * GIB, "address": "127.0.0.1", "incarnation": "boot-1",
            "public_key": key(),
        }  # fmt: skip
        return Hello(**{**fields, **more})

    def machine(self, machine: str, gpus: int = 4, **more: Any) -> Welcome:
        """Registers a machine and makes it ready."""
        hello = self.hello(machine, gpus, **more)
        welcome = self.machines.register(hello)
        self.machines.ready(self.attend(machine, hello.incarnation, welcome.stop))
        return welcome

    def attend(self, machine: str, incarnation: str = "boot-1", stop: Sequence[str] = ()) -> Attend:
        """Returns the request of a machine's workflow that reports `stop` as stopped."""
        return Attend(machine, incarnation, list(stop))

    def table(self, name: str, size_bytes: int, *regions: str, home: str | None = None) -> None:
        """Adds a table with complete replicas in `regions`."""
        with self.session() as session:
            session.add(Table(name=name, home_region=home or regions[0]))
            session.flush()
            session.add(Partition(data_table=name, name="all", location=f"tables/{name}/", size_bytes=size_bytes))
            session.flush()
            for region in regions:
                session.add(Replica(data_table=name, region=region, state="ready", done_bytes=size_bytes))

    def submit(
        self,
        *jobs: JobSpec,
        tenant: str = "t",
        limits: LimitsSpec | None = None,
        id_: str | None = None,
        by: str = "",
        **more: Any,
    ) -> str:
        """Writes a workload as the API does; returns its id."""
        name = id_ or f"{self.prefix}-{next(self._numbers):04d}"
        spec = WorkloadSpec(name=name, tenant=tenant, jobs=jobs or (job(),), limits=limits or LimitsSpec(), **more)
        reason = Reason(ReasonCode.SCAN_PENDING)
        with self.session() as session:
            session.add(
                Workload(
                    id=name, tenant=tenant, name=name, spec=spec.model_dump(mode="json"), reason=reason.to_json(),
                    level=spec.level, submitted_by=by,
                )
            )  # fmt: skip
            session.flush()
            if spec.array is not None:
                insert_array(session, name, spec.array)
            events.record(
                session, "workload.pending", tenant=tenant, workload=name, attempt=0, reason=reason, dedup="submitted"
            )
            outbox.start_workload(session, name)
            outbox.wake_scheduler(session)
        return name

    # -------------------------------------------------------------------------------------------------- operations

    def scan(self) -> ScanTicket:
        """Runs one scan."""
        ticket = self.auction.scan()
        assert len(self.queue()) == ticket.queued
        return ticket

    def queue(self) -> list[str]:
        """Returns the ids of the workloads of the last scan, in queue order."""
        scanned = self.auction._scanned
        assert scanned is not None
        return [queued.workload for queued in scanned.batch(0, len(scanned))]

    def bid(self, *unreachable: str) -> ScanTicket:
        """Runs one scan and the bids of all regions except `unreachable` on the first batch."""
        ticket = self.scan()
        for region in ticket.regions:
            if region not in unreachable:
                self.regions.bid(BidRequest(region, ticket.scan, 0))
        return ticket

    def award(self, ticket: ScanTicket, *unreachable: str) -> AwardResult:
        """Awards the bids on the first batch of a scan."""
        return self.auction.award(AwardRequest(ticket.scan, 0, list(unreachable), 30.0))

    def tick(self, *unreachable: str) -> AwardResult:
        """Runs one scan with its bids and awards."""
        return self.award(self.bid(*unreachable), *unreachable)

    def offer(self, workload: str) -> Offer:
        """Returns the current best bid for a workload without awarding it."""
        self.scan()
        assert self.auction._scanned is not None
        (queued,) = self.auction._scanned.batch(self.queue().index(workload), 1)
        with self.session() as session:
            (wanted,) = asked(session, [queued])
        with self.scheduler_state.current() as state:
            bids = [region_bid(state.planner(region), wanted) for region in sorted(state.regions)]
        found = [b for b in bids if b.plan is not None]
        assert found, f"no region has a plan for {workload}"
        best = min(found, key=lambda b: b.plan.key if b.plan else ())
        assert best.plan is not None
        best = replace(best, victim_attempts=self.scheduler_state.regions[best.region].attempts(best.plan.victims))
        return Offer(best, awards.PlannedAward(best.plan, queued.rank, wanted.demand.jobs, best.victim_attempts))

    def accept(self, offer: Offer) -> bool:
        """Awards a bid in one transaction; returns False if the workload is not queued any more.

        Raises:
            StalePlan: the facts of the plan have changed.
        """
        done = self.award_all([offer.candidate])
        if done.verdict is awards.AwardFailure.STALE:
            raise StalePlan(offer.bid.workload)
        return done.count == 1

    def award_all(self, candidates: Iterable[awards.PlannedAward]) -> awards.Awarded:
        """Awards candidates in order."""
        with awards.connected(self.engine) as connection:
            return awards.award(connection, candidates)

    def change(self, workload: str, phase: Phase, attempt: int | None = None) -> bool:
        """Changes a workload's phase as its workflow does."""
        number = self.workload(workload).attempt if attempt is None else attempt
        reason = Reason(WHY.get(phase, ReasonCode.STARTING_TASKS)).to_json()
        return self.workloads.transition(TransitionRequest(workload, number, phase.value, reason))

    def run(self, workload: str, ago_s: float = 0.0) -> None:
        """Sets a placed workload to running since `ago_s` seconds."""
        self.change(workload, Phase.PROVISIONING)
        self.change(workload, Phase.RUNNING)
        with self.session() as session:
            session.execute(
                text(
                    "update attempt set started_at = now() - make_interval(secs => :s),"
                    " awarded_at = now() - make_interval(secs => :s) where workload = :w and released_at is null"
                ),
                {"s": ago_s, "w": workload},
            )

    def release(
        self, workload: str, phase: Phase, attempt: int | None = None, blames: str | None = None,
        progress: Sequence[TaskProgress] = (), silent: Sequence[str] = (), unstarted: bool = False,
        code: ReasonCode | None = None,
    ) -> None:  # fmt: skip
        """Ends an attempt as its workflow does; `silent` are the machines whose agents did not respond.

        `unstarted`: the workflow says that it asked no agent to start tasks. `code`: why, if not the usual reason.
        """
        number = self.workload(workload).attempt if attempt is None else attempt
        with self.session() as session:
            held = select(Allocation.machine).where(Allocation.workload == workload, Allocation.attempt == number)
            machine = session.scalars(held.order_by(Allocation.machine).limit(1)).first()
        lost = WHY[phase] is ReasonCode.MACHINE_LOST
        reason = Reason(code or WHY[phase], {"machine": blames or machine} if lost else {}).to_json()
        self.workloads.release(
            ReleaseRequest(
                workload, number, phase.value, reason, list(progress), blames, list(silent), unstarted=unstarted
            )
        )

    def book(self, *places: tuple[str, str], keeps: bool = False, attempt: int | None = None) -> bool:
        """Books, for each workload of one job, a place for all of its tasks on one machine, as a move does."""
        planned = []
        for workload, machine in places:
            jobs = tuple(WorkloadSpec.model_validate(self.workload(workload).spec).requests())
            region, cluster, _ = machine.split("/")
            placed = JobPlacement(jobs[0].name, cluster, "a100", ((machine, jobs[0].tasks),))
            now = self.attempt(workload)
            plan = Plan(workload, region, (placed,), (), PlanQuality())
            reason = Reason(ReasonCode.MOVED, {"from": sorted(self.holdings(workload)), "to": [machine], "freed": 1})
            planned.append(
                PlannedBooking(awards.PlannedAward(plan, now.rank, jobs), attempt or now.attempt, reason, keeps)
            )
        with awards.connected(self.engine) as connection:
            return book(connection, planned)

    def running(self, *jobs: JobSpec, ago_s: float = 600.0, **more: Any) -> str:
        """Submits and awards a workload that has been running for `ago_s` seconds; returns its id."""
        workload = self.submit(*jobs, **more)
        self.tick()
        self.run(workload, ago_s)
        return workload

    def alter(self, model: type[Base], ids: Any, **values: Any) -> None:
        """Changes columns of a row directly."""
        with self.session() as session:
            row = session.get_one(model, ids)
            for name, value in values.items():
                setattr(row, name, value)

    def saved(self, workload: str, ago_s: float) -> None:
        """Records a checkpoint of the newest attempt `ago_s` seconds ago."""
        with self.session() as session:
            session.execute(
                text(
                    "update attempt set checkpoint_step = 1, checkpoint_at = now() - make_interval(secs => :s)"
                    " where workload = :w and released_at is null"
                ),
                {"s": ago_s, "w": workload},
            )

    def delivered(self) -> None:
        """Marks all messages as delivered."""
        with self.session() as session:
            session.execute(update(Outbox).values(delivered_at=text("now()")))

    # ----------------------------------------------------------------------------------------------------- queries

    def workload(self, workload: str) -> Workload:
        """Returns a workload's row."""
        with self.session() as session:
            return session.get_one(Workload, workload)

    def attempt(self, workload: str, number: int | None = None) -> Attempt:
        """Returns the row of an attempt, by default the newest."""
        with self.session() as session:
            return session.get_one(Attempt, (workload, number or session.get_one(Workload, workload).attempt))

    def holdings(self, workload: str, number: int | None = None) -> dict[str, tuple[int, int]]:
        """Returns (slots held, slots awaited) for each machine of an attempt, by default the newest."""
        with self.session() as session:
            number = number or session.get_one(Workload, workload).attempt
            rows = session.scalars(
                select(Allocation).where(Allocation.workload == workload, Allocation.attempt == number)
            )
            return {row.machine: (row.slots, row.awaited) for row in rows}

    def masks(self, machine: str) -> tuple[int, int]:
        """Returns the bit masks of a machine's held and promised slots."""
        with self.session() as session:
            row = session.get_one(Machine, machine)
            return row.held, row.promised

    def mail(self, workload: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Returns all messages to a workload's workflow, delivered or not, in order; with `kind` only that kind."""
        with self.session() as session:
            rows = session.scalars(
                select(Outbox).where(Outbox.workload == workload, Outbox.kind == "mail").order_by(Outbox.id)
            )
            return [row.body for row in rows if kind is None or row.body["kind"] == kind]

    def unconfirmed(self) -> list[tuple[str, str]]:
        """Returns machine and run of each stop request to machine workflows, in order."""
        with self.session() as session:
            rows = session.scalars(select(Outbox).where(Outbox.kind == "unconfirmed").order_by(Outbox.id))
            return [(row.body["machine"], row.body["run"]) for row in rows]

    def put_out(self, kind: str) -> int:
        """Returns how many rows of a kind were written to the outbox."""
        with self.session() as session:
            return len(session.scalars(select(Outbox.id).where(Outbox.kind == kind)).all())

    def waiting(self, workload: str) -> list[str]:
        """Returns the codes of a workload's waiting reasons, each with its region if it has one."""
        return [" ".join([r["code"], *([r["detail"]["region"]] if "region" in r["detail"] else [])])
                for r in self.reasons(workload)]  # fmt: skip

    def reasons(self, workload: str) -> list[dict[str, Any]]:
        """Returns a workload's waiting reasons."""
        with self.session() as session:
            row = session.get(Waiting, workload)
            return list(row.reasons["reasons"]) if row is not None else []

    def evictions(self) -> set[tuple[str, int, str, int]]:
        """Returns evictor, its attempt, victim and its attempt of each eviction."""
        with self.session() as session:
            rows = session.scalars(select(Eviction))
            return {(r.evictor, r.evictor_attempt, r.victim, r.victim_attempt) for r in rows}

    def events(self, workload: str | None = None, kind: str | None = None) -> list[dict[str, Any]]:
        """Returns the events in order, as mappings."""
        with self.session() as session:
            rows = session.execute(text("select * from event order by id")).mappings()
            return [dict(r) for r in rows if workload in (None, r["workload"]) and (kind is None or r["kind"] == kind)]

    def dump(self) -> dict[str, list[str]]:
        """Returns every row of every table as text."""
        with self.session() as session:
            return {
                table.name: list(session.scalars(text(f'select t::text from "{table.name}" t order by 1')))
                for table in SCHEMA.sorted_tables
            }


def by_workload(session: Session) -> dict[str, list[Allocation]]:
    """Returns the live allocations of each workload's attempt, without what is booked for the next one."""
    out: dict[str, list[Allocation]] = defaultdict(list)
    own = (Attempt.workload == Allocation.workload) & (Attempt.attempt == Allocation.attempt)
    for row in session.scalars(select(Allocation).join(Attempt, own).where(Allocation.released_at.is_(None))):
        out[row.workload].append(row)
    return out
