"""The auction: a scan ranks the queue, regions bid, and one transaction for each workload awards (MAST 4.2, 4.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, delete, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from temporalio import activity

import gms.scan
import rms.compare
import rms.region
from activities import on_demand, slots, snapshots
from activities.bids import BID, Bidder, region_bid
from activities.workloads import change_phase
from domain.phases import QUEUED_PHASES, Phase
from domain.protocol import (
    Activity,
    AwardRequest,
    AwardResult,
    DryRunRequest,
    DryRunResult,
    MailKind,
    ScanTicket,
)
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid, JobRequest, Plan, QueuedWorkload
from domain.spec import WorkloadSpec
from infra.config import Settings
from infra.db import outbox
from infra.db.models import Attempt, Eviction, Publication, Region, RegionBid, Waiting, Workload
from infra.db.session import transaction
from rms.gang import Planner

DRY_RUN_ID = "~dry-run"
"""Sorts after every id, so that ties go to workloads that exist."""
_TRIES = 3
"""How often a workload's plan may turn out stale before the next tick tries it again."""


def regions(session: Session) -> list[str]:
    """All regions, by name."""
    return list(session.scalars(select(Region.name).order_by(Region.name)))


class AuctionActivities:
    """The queue's side: scans and awards."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._bidder = Bidder(engine, settings)

    @activity.defn(name=Activity.SCAN.value)
    def scan(self, _: None = None) -> ScanTicket:
        """One GMS scan pass over all pending workloads, published for reading."""
        scheduler = self._settings.scheduler
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            snapshot = snapshots.queue_snapshot(session, scheduler)
            names = regions(session)
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
            workloads=[r.id for r in result.queue],
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
            for row in session.scalars(
                select(RegionBid).where(RegionBid.scan == request.scan, RegionBid.workload.in_(request.workloads))
            ):
                bids[row.workload].append(BID.validate_python(row.body))
            queue = snapshots.published_queue(session)
        result = AwardResult(awarded=0, waiting=0, rebids=0)
        changed: set[str] = set()
        for workload in request.workloads:
            item = queue.items.get(workload)
            answers = {b.region: b for b in bids[workload]}
            for region in request.unreachable:
                detail = {"region": region, "waited_s": request.waited_s}
                answers[region] = Bid(workload, region, None, (Reason(ReasonCode.REGION_UNREACHABLE, detail),))
            stale = {r for r, b in answers.items() if b.plan is not None and r in changed}
            for _ in range(_TRIES):
                for region in sorted(stale):
                    answers.pop(region)
                    answers.update((b.region, b) for b in self._bidder.bids(region, [workload], queue))
                    result.rebids += 1
                best = rms.compare.best([b.plan for b in answers.values() if b.plan is not None])
                if best is None:
                    self._explain_waiting(workload, answers, queue, request.unreachable)
                    result.waiting += 1
                    break
                try:
                    won = self._award_one(best, answers[best.region].victim_attempts, item, queue.placed)
                except (slots.StalePlan, IntegrityError):
                    stale = {best.region}
                    continue
                if won:
                    changed.add(best.region)
                    result.awarded += 1
                break
            else:
                region = next(iter(stale))
                conflict = Bid(workload, region, None, (Reason(ReasonCode.AWARD_CONFLICT, {"region": region}),))
                self._explain_waiting(workload, {**answers, region: conflict}, queue, request.unreachable)
                result.waiting += 1
                with transaction(self._engine) as session:
                    outbox.wake_scheduler(session)
        return result

    def _award_one(
        self, plan: Plan, victims: Mapping[str, int], item: Mapping[str, Any] | None, ranks: Mapping[str, int]
    ) -> bool:
        """The one transaction: checks that the plan's facts still hold and takes the slots. False: no longer queued.

        `victims` are the plan's, each with the attempt that it is about; `ranks` are those of placed workloads.

        Raises:
            StalePlan: the facts do not hold any more.
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
            attempts = {v: self._check_victim(session, plan, rows.get(v), victims.get(v)) for v in plan.victims}
            if snapshots.evictors(session, [row.id])[row.id] & set(plan.victims):
                raise slots.StalePlan(f"a victim of {plan.workload} has evicted it meanwhile")
            spec = WorkloadSpec.model_validate(row.spec)
            requests = spec.requests()
            row.attempt += 1
            row.region = plan.region
            own = self._attempt(row, plan, requests, snapshots.rank_of_queued(item))
            session.add(own)
            session.flush()
            for victim, attempt in attempts.items():
                session.add(
                    Eviction(evictor=row.id, evictor_attempt=row.attempt, victim=victim, victim_attempt=attempt.attempt)
                )
            taken_from = {v: a.attempt for v, a in attempts.items()}
            ready = slots.take(session, row.id, row.attempt, requests, plan.jobs, taken_from)
            own.ready_at = func.clock_timestamp() if ready else None
            self._tell(session, row, plan, ready, own.plan["rank"], attempts, ranks)
        return True

    @staticmethod
    def _attempt(row: Workload, plan: Plan, requests: tuple[JobRequest, ...], rank: int) -> Attempt:
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
                "rank": rank,
                "lost_gpu_s": plan.quality.lost_gpu_s,
            },
            awarded_at=func.clock_timestamp(),
            gpu_types=gpu_types,
            cpus_milli=sum(r.cpus_milli for r in requests),
        )

    @staticmethod
    def _check_victim(session: Session, plan: Plan, row: Workload | None, number: int | None) -> Attempt:
        # Read without a lock: the workload's own, which is held, keeps all that is asked here as it is.
        attempt = session.get(Attempt, (row.id, row.attempt)) if row is not None and row.attempt == number else None
        if attempt is None or attempt.released_at is not None or attempt.evicting_since is not None:
            raise slots.StalePlan(f"a victim of {plan.workload} is gone")
        return attempt

    @staticmethod
    def _tell(
        session: Session,
        row: Workload,
        plan: Plan,
        ready: bool,
        rank: int,
        victims: Mapping[str, Attempt],
        ranks: Mapping[str, int],
    ) -> None:
        """The rest of the award: the phase, who is told, and why nobody waits for it any more."""
        for victim, attempt in victims.items():
            attempt.evicting_since = func.clock_timestamp()
            attempt.evictor = row.id
            detail = {"evictor": row.id, "evictor_rank": rank, "rank": snapshots.rank_of_placed(attempt, ranks)}
            outbox.mail(session, victim, MailKind.EVICT, attempt.attempt, **detail)
        machines = sorted({m for job in plan.jobs for m, _ in job.machines})
        detail = {"region": plan.region, "machines": len(machines), "victims": len(plan.victims)}
        reason = Reason(ReasonCode.AWARDED, detail)
        if not ready:
            reason = Reason(ReasonCode.WAITING_FOR_VICTIMS, {"victims": list(plan.victims), "region": plan.region})
        change_phase(
            session, row, Phase.PLACING, reason.to_json(), machines=machines, victims=list(plan.victims), rank=rank
        )
        session.execute(delete(Waiting).where(Waiting.workload == row.id))
        outbox.mail(session, row.id, MailKind.AWARDED, row.attempt, ready=ready, region=plan.region, rank=rank)

    def _explain_waiting(
        self, workload: str, answers: Mapping[str, Bid], queue: snapshots.PublishedQueue, unreachable: Sequence[str]
    ) -> None:
        """Publishes why a workload waits; starts to bring its data near hardware where no region has both."""
        item = queue.items.get(workload)
        reasons = [reason for _, bid in sorted(answers.items()) for reason in bid.reasons]
        if item and item["reason"]:
            reasons.insert(0, Reason.from_json(item["reason"]))
        offers: list[Bid] | None = None
        if on_demand.lacks_only_data(answers.values()):
            offers = self._offers_without_data(workload, sorted(answers.keys() - set(unreachable)), queue, unreachable)
        with transaction(self._engine) as session:
            row = session.get(Workload, workload, with_for_update=True)
            if row is None or Phase(row.phase) not in QUEUED_PHASES:
                return
            if offers is not None:
                spec = WorkloadSpec.model_validate(row.spec)
                reasons = on_demand.bring_data(session, row, spec, offers) + reasons
            body = {"reasons": [r.to_json() for r in reasons]}
            found = session.get(Waiting, workload)
            if found is None or found.reasons != body:
                session.merge(Waiting(workload=workload, reasons=body, at=func.now()))

    def _offers_without_data(
        self, workload: str, reachable: Sequence[str], queue: snapshots.PublishedQueue, unreachable: Sequence[str]
    ) -> list[Bid] | None:
        """The regions' answers as if its tables were there; None where no copy is wanted."""
        with transaction(self._engine) as session:
            row = session.get(Workload, workload)
            if row is None:
                return None
            spec = WorkloadSpec.model_validate(row.spec)
            if on_demand.may_be_placed_later(session, spec, unreachable):
                return None
            if on_demand.is_on_its_way(session, workload, spec.tables):
                return []
        return [b for r in reachable for b in self._bidder.bids(r, [workload], queue, ignore_data=True)]

    @activity.defn(name=Activity.DRY_RUN.value)
    def dry_run(self, request: DryRunRequest) -> DryRunResult:
        """Scans and bids with one more workload in the queue. Nothing is written."""
        spec = WorkloadSpec.model_validate(request.spec)
        with transaction(self._engine, isolation="REPEATABLE READ") as session:
            snapshot = snapshots.queue_snapshot(session, self._settings.scheduler)
            own = QueuedWorkload(DRY_RUN_ID, spec.tenant, snapshot.now_s, spec.requests(), spec.level)
            result = gms.scan.scan(replace(snapshot, pending=(*snapshot.pending, own)))
            ranked = next(r for r in result.queue if r.id == DRY_RUN_ID)
            scheduler, ranks = self._settings.scheduler, dict(result.placed_ranks)
            states = [snapshots.region_snapshot(session, region, ranks, scheduler) for region in regions(session)]
            replicas = snapshots.ready_replicas(session, spec.tables)
        item = {"rank": ranked.rank, "gpu_types": ranked.gpu_types}
        asked = snapshots.placement_request(DRY_RUN_ID, item, spec)
        answers = [region_bid(Planner(rms.region.Region.of(state)), spec, asked, replicas) for state in states]
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
