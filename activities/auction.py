"""The auction: a scan ranks the queue, regions bid, and one transaction for each workload awards (MAST 4.2, 4.3)."""

import json
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Engine, delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from temporalio import activity

import gms.scan
import rms.bid
import rms.compare
from activities import on_demand, slots, snapshots
from activities.workloads import change_phase
from domain.phases import QUEUED_PHASES, Phase
from domain.priority import LOWEST_LEVEL
from domain.protocol import (
    Activity,
    AwardRequest,
    AwardResult,
    BidRequest,
    DryRunRequest,
    DryRunResult,
    MailKind,
    ScanTicket,
)
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid, JobRequest, PlacementRequest, Plan, QueuedWorkload, RegionSnapshot
from domain.spec import WorkloadSpec
from infra.bootstrap import PAUSED
from infra.config import Settings
from infra.db import outbox
from infra.db.models import Attempt, Eviction, Publication, Region, RegionBid, Setting, Waiting, Workload
from infra.db.session import transaction

_BID = TypeAdapter(Bid)
DRY_RUN_ID = "~dry-run"
"""Sorts after every id, so that ties go to workloads that exist."""


def regions(session: Session) -> list[str]:
    """All regions, by name."""
    return list(session.scalars(select(Region.name).order_by(Region.name)))


def region_bid(
    session: Session,
    snapshot: RegionSnapshot,
    spec: WorkloadSpec,
    request: PlacementRequest,
    *,
    ignore_data: bool = False,
) -> Bid:
    """One region's answer for one workload: whether it may run there, the data is there, and a plan (MAST 4.3)."""
    region = snapshot.region
    if not spec.allows_region(region):
        return Bid(request.workload, region, None, (Reason(ReasonCode.REGION_EXCLUDED, {"region": region}),))
    answer = rms.bid.bid(snapshot, request)
    missing = [t for t, where in snapshots.ready_replicas(session, spec.tables).items() if region not in where]
    if not missing or ignore_data:
        return answer
    no_hardware = tuple(r for r in answer.reasons if r.code is ReasonCode.NO_HARDWARE)
    absent = tuple(Reason(ReasonCode.DATA_NOT_HERE, {"region": region, "table": t}) for t in sorted(missing))
    return Bid(request.workload, region, None, (*no_hardware, *absent))


class RegionActivities:
    """What a region's RMS processes do in an auction. They touch nothing but their own bids."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.BID.value)
    def bid(self, request: BidRequest) -> int:
        """Bids on a batch, each workload against the same snapshot; the number of plans found."""
        rows: list[dict[str, Any]] = []
        plans = 0
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            queue = snapshots.published_queue(session)
            items = {item["id"]: item for item in queue.get("items", [])}
            snapshot = snapshots.region_snapshot(
                session, request.region, queue.get("placed", {}), self._settings.scheduler
            )
            for workload in session.scalars(select(Workload).where(Workload.id.in_(request.workloads))):
                spec = WorkloadSpec.model_validate(workload.spec)
                asked = snapshots.placement_request(session, workload.id, items.get(workload.id), spec)
                answer = region_bid(session, snapshot, spec, asked)
                plans += answer.plan is not None
                body = json.loads(_BID.dump_json(answer))
                rows.append({"scan": request.scan, "region": request.region, "workload": workload.id, "body": body})
        with transaction(self._engine) as session:
            if rows:
                session.execute(insert(RegionBid).on_conflict_do_nothing(), rows)
        return plans


class AuctionActivities:
    """The queue's side: scans and awards."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.SCAN.value)
    def scan(self, _: None = None) -> ScanTicket:
        """One GMS scan pass over all pending workloads, published for reading."""
        scheduler = self._settings.scheduler
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            snapshot = snapshots.queue_snapshot(session, scheduler)
            names = regions(session)
            setting = session.get(Setting, PAUSED)
            paused = setting is not None and bool(setting.value["paused"])
        result = gms.scan.scan(snapshot)
        items = [
            {
                "id": r.id,
                "rank": r.rank,
                "level": r.level,
                "over_quota": r.over_quota,
                "credit": r.credit,
                "gpu_types": [list(t) for t in r.gpu_types],
                "reason": r.reason.to_json() if r.reason else None,
                "position": position,
            }
            for position, r in enumerate(result.queue, 1)
        ]
        with transaction(self._engine) as session:
            number = int(session.execute(text("select nextval('scan_number')")).scalar_one())
            body = {"scan": number, "scanned_at_s": snapshot.now_s, "items": items, "placed": dict(result.placed_ranks)}
            publication = insert(Publication).values(name=snapshots.QUEUE, body=body, at=func.clock_timestamp())
            session.execute(
                publication.on_conflict_do_update(
                    index_elements=["name"], set_={"body": publication.excluded.body, "at": publication.excluded.at}
                )
            )
            session.execute(delete(RegionBid).where(RegionBid.scan < number))
        return ScanTicket(
            scan=number,
            workloads=[] if paused else [r.id for r in result.queue],
            regions=names,
            batch=scheduler.batch,
            bid_timeout_s=scheduler.bid_timeout_s,
            interval_s=scheduler.scan_interval_s,
        )

    @activity.defn(name=Activity.AWARD.value)
    def award(self, request: AwardRequest) -> AwardResult:
        """Awards a batch in queue order, one transaction for each workload.

        A region in which an earlier workload of the batch was placed bids again (in this process, on the changed
        state), so the result is that of placing one workload at a time.
        """
        with transaction(self._engine) as session:
            bids: dict[str, list[Bid]] = {w: [] for w in request.workloads}
            for row in session.scalars(select(RegionBid).where(RegionBid.scan == request.scan)):
                if row.workload in bids:
                    bids[row.workload].append(_BID.validate_python(row.body))
            queue = snapshots.published_queue(session)
        items = {item["id"]: item for item in queue.get("items", [])}
        ranks = queue.get("placed", {})
        result = AwardResult(awarded=0, waiting=0, rebids=0)
        changed: set[str] = set()
        for workload in request.workloads:
            answers = {b.region: b for b in bids[workload]}
            for region in request.unreachable:
                detail = {"region": region, "waited_s": request.waited_s}
                answers[region] = Bid(workload, region, None, (Reason(ReasonCode.REGION_UNREACHABLE, detail),))
            stale = {r for r, b in answers.items() if b.plan is not None and r in changed}
            for _ in range(3):
                for region in sorted(stale):
                    answers[region] = self._bid_again(workload, region, items.get(workload), ranks)
                    result.rebids += 1
                best = rms.compare.best([b.plan for b in answers.values() if b.plan is not None])
                if best is None:
                    self._explain_waiting(workload, answers, items.get(workload), ranks)
                    result.waiting += 1
                    break
                try:
                    won = self._award_one(best, items.get(workload), ranks)
                except (slots.StalePlan, IntegrityError):
                    stale = {best.region}
                    continue
                if won:
                    changed.add(best.region)
                    ranks[workload] = items[workload]["rank"] if workload in items else LOWEST_LEVEL
                    result.awarded += 1
                break
            else:
                region = next(iter(stale))
                conflict = Bid(workload, region, None, (Reason(ReasonCode.AWARD_CONFLICT, {"region": region}),))
                self._explain_waiting(workload, {**answers, region: conflict}, items.get(workload), ranks)
                result.waiting += 1
                with transaction(self._engine) as session:
                    outbox.wake_scheduler(session)
        return result

    def _bid_again(self, workload: str, region: str, item: dict[str, Any] | None, ranks: dict[str, int]) -> Bid:
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            row = session.get_one(Workload, workload)
            spec = WorkloadSpec.model_validate(row.spec)
            snapshot = snapshots.region_snapshot(session, region, ranks, self._settings.scheduler)
            return region_bid(session, snapshot, spec, snapshots.placement_request(session, workload, item, spec))

    def _award_one(self, plan: Plan, item: dict[str, Any] | None, ranks: dict[str, int]) -> bool:
        """The one transaction: checks that the plan's facts still hold and takes the slots. False: no longer queued.

        Raises:
            StalePlan: they do not hold any more.
        """
        with transaction(self._engine) as session:
            rows = {
                row.id: row
                for row in session.scalars(
                    select(Workload)
                    .where(Workload.id.in_([plan.workload, *plan.victims]))
                    .order_by(Workload.id)
                    .with_for_update()
                )
            }
            row = rows.get(plan.workload)
            if row is None or Phase(row.phase) not in QUEUED_PHASES or row.held_by is not None:
                return False
            victims = {v: self._check_victim(session, rows.get(v), plan) for v in plan.victims}
            spec = WorkloadSpec.model_validate(row.spec)
            requests = spec.requests()
            row.attempt += 1
            row.region = plan.region
            session.add(self._attempt(row, plan, requests, item))
            session.flush()
            for victim, attempt in victims.items():
                session.add(
                    Eviction(evictor=row.id, evictor_attempt=row.attempt, victim=victim, victim_attempt=attempt.attempt)
                )
            ready = slots.take(
                session, row.id, row.attempt, requests, plan.jobs, {v: a.attempt for v, a in victims.items()}
            )
            self._commit(session, row, plan, victims, ready, item, ranks)
        return True

    @staticmethod
    def _attempt(row: Workload, plan: Plan, requests: tuple[JobRequest, ...], item: dict[str, Any] | None) -> Attempt:
        gpu_types: dict[str, int] = {}
        for request, job in zip(requests, plan.jobs, strict=True):
            if job.gpu_type is not None and request.gpus:
                gpu_types[job.gpu_type] = gpu_types.get(job.gpu_type, 0) + request.gpus
        return Attempt(
            workload=row.id,
            attempt=row.attempt,
            region=plan.region,
            plan={
                "jobs": [
                    {"job": j.job, "cluster": j.cluster, "gpu_type": j.gpu_type, "machines": list(j.machines)}
                    for j in plan.jobs
                ],
                "victims": list(plan.victims),
                "rank": item["rank"] if item else None,
                "lost_gpu_s": plan.quality.lost_gpu_s,
            },
            awarded_at=func.clock_timestamp(),
            gpu_types=gpu_types,
            cpus_milli=sum(r.cpus_milli for r in requests),
        )

    @staticmethod
    def _check_victim(session: Session, row: Workload | None, plan: Plan) -> Attempt:
        attempt = session.get(Attempt, (row.id, row.attempt), with_for_update=True) if row is not None else None
        if attempt is None or attempt.released_at is not None or attempt.evicting_since is not None:
            raise slots.StalePlan(f"a victim of {plan.workload} is gone")
        return attempt

    def _commit(
        self,
        session: Session,
        row: Workload,
        plan: Plan,
        victims: dict[str, Attempt],
        ready: bool,
        item: dict[str, Any] | None,
        ranks: dict[str, int],
    ) -> None:
        """The rest of the award: the phase, who is told, and why nobody waits for it any more."""
        rank = item["rank"] if item else None
        for victim, attempt in victims.items():
            attempt.evicting_since = func.clock_timestamp()
            attempt.evictor = row.id
            detail = {"evictor": row.id, "evictor_rank": rank, "rank": ranks.get(victim)}
            outbox.mail(session, victim, MailKind.EVICT, attempt.attempt, **detail)
        own = session.get_one(Attempt, (row.id, row.attempt))
        machines = sorted({m for job in plan.jobs for m, _ in job.machines})
        detail = {"region": plan.region, "machines": len(machines), "victims": len(plan.victims)}
        reason = Reason(ReasonCode.AWARDED, detail)
        if not ready:
            reason = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": list(plan.victims), "region": plan.region})
        else:
            own.ready_at = func.clock_timestamp()
        change_phase(
            session, row, Phase.PLACING, reason.to_json(), machines=machines, victims=list(plan.victims), rank=rank
        )
        session.execute(delete(Waiting).where(Waiting.workload == row.id))
        outbox.mail(session, row.id, MailKind.AWARDED, row.attempt, ready=ready, region=plan.region)

    def _explain_waiting(
        self, workload: str, answers: dict[str, Bid], item: dict[str, Any] | None, ranks: dict[str, int]
    ) -> None:
        """Publishes why a workload waits; starts to bring its data near hardware where no region has both."""
        reasons = [reason for _, bid in sorted(answers.items()) for reason in bid.reasons]
        if item and item["reason"]:
            reasons.insert(0, Reason.from_json(item["reason"]))
        with transaction(self._engine) as session:
            row = session.get_one(Workload, workload)
            if Phase(row.phase) not in QUEUED_PHASES:
                return
            spec = WorkloadSpec.model_validate(row.spec)
            if on_demand.needs_data(spec, answers):
                request = snapshots.placement_request(session, workload, item, spec)

                def bid_without_data(region: str) -> Bid:
                    snapshot = snapshots.region_snapshot(session, region, ranks, self._settings.scheduler)
                    return region_bid(session, snapshot, spec, request, ignore_data=True)

                reasons = on_demand.bring_data(session, row, spec, sorted(answers), bid_without_data) + reasons
            body = {"reasons": [r.to_json() for r in reasons]}
            found = session.get(Waiting, workload)
            if found is None or found.reasons != body:
                session.merge(Waiting(workload=workload, reasons=body, at=func.now()))

    @activity.defn(name=Activity.DRY_RUN.value)
    def dry_run(self, request: DryRunRequest) -> DryRunResult:
        """Scans and bids with one more workload in the queue. Nothing is written."""
        spec = WorkloadSpec.model_validate(request.spec)
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            snapshot = snapshots.queue_snapshot(session, self._settings.scheduler)
            own = QueuedWorkload(DRY_RUN_ID, spec.tenant, snapshot.now_s, spec.requests(), spec.level)
            result = gms.scan.scan(replace(snapshot, pending=(*snapshot.pending, own)))
            ranked = next(r for r in result.queue if r.id == DRY_RUN_ID)
            item = {"rank": ranked.rank, "gpu_types": ranked.gpu_types}
            asked = snapshots.placement_request(session, DRY_RUN_ID, item, spec)
            answers = []
            for region in regions(session):
                state = snapshots.region_snapshot(session, region, dict(result.placed_ranks), self._settings.scheduler)
                answers.append(region_bid(session, state, spec, asked))
        reasons = ([ranked.reason] if ranked.reason else []) + [r for bid in answers for r in bid.reasons]
        best = rms.compare.best([b.plan for b in answers if b.plan is not None])
        out = DryRunResult(
            admitted=best is not None,
            rank=ranked.rank,
            over_quota=ranked.over_quota,
            reasons=[r.to_json() for r in reasons],
        )
        if best is not None:
            out.region = best.region
            out.machines = sorted({m for job in best.jobs for m, _ in job.machines})
            out.victims = list(best.victims)
        return out
