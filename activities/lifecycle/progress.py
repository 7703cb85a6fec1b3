"""Reads the progress of running workloads from their nodes' heartbeats, and finds hung gangs and expired waits.

Temporal stores the newest heartbeat of each node but does not send notifications of it, so it is polled. A
workload that has been queued for longer than `limits.max_pending` is ended, too.
"""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from math import inf

from sqlalchemy import Engine, cast, func, select, text
from sqlalchemy.dialects.postgresql import JSONPATH
from temporalio.client import Client

from activities.leader import Leader, lead
from activities.lifecycle import lent_work
from activities.lifecycle.attempt_reports import set_bandwidth, set_preparing, set_progress
from activities.lifecycle.beats import Beat, for_each, own_progress, read_beats
from activities.lifecycle.dependencies import decide_dependencies
from activities.lifecycle.workloads import record_checkpoint
from activities.services.readiness import record_readiness
from domain.phases import QUEUED_PHASES, Phase
from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason, ReasonCode
from domain.spec import WorkloadSpec
from infra.config.settings import Settings
from infra.db import events, outbox
from infra.db.models import Attempt, Workload
from infra.db.queued_end import end_queued
from infra.db.session import in_thread, transaction

_BRINGS_IMAGE = func.jsonb_path_exists(Workload.spec, cast("$.jobs[*].image ? (@ != null)", JSONPATH))
"""Before its tasks run, only the fetching of an image takes long enough to be worth a look."""


class ProgressReader:
    """Reads progress in rounds. In an installation, one process runs them; the others are on standby."""

    def __init__(self, engine: Engine, settings: Settings, client: Client) -> None:
        self._engine = engine
        self._settings = settings
        self._client = client
        self._collected = ""
        """The workload that was read last: the cursor of the rounds."""

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(self._engine, Leader.PROGRESS, "progress", self.round, self._settings.lifecycle.collect_interval_s)

    async def round(self) -> None:
        """Decides dependencies; ends workloads that have waited too long; reads the progress of running workloads.

        Up to `collect_at_most` are read, in the order of their ids. The next round continues where this one ended.
        """
        await in_thread(partial(decide_dependencies, self._engine))
        await in_thread(partial(expire_pending, self._engine))
        attempts = dict(await in_thread(self._placed))

        async def one(workload: str) -> None:
            beats = await read_beats(self._client, workload)
            if beats:
                await in_thread(self._take, workload, attempts[workload], beats)
                await in_thread(record_readiness, self._engine, workload, beats)

        await for_each(attempts, one)

    def _placed(self) -> list[tuple[str, int]]:
        running = (
            select(Workload.id, Workload.attempt)
            .where(Workload.finished_at.is_(None))
            .where(
                Workload.phase.in_([Phase.RUNNING.value, Phase.CHECKPOINTING.value])
                | ((Workload.phase == Phase.PROVISIONING.value) & _BRINGS_IMAGE)
            )
            .order_by(Workload.id)
        )
        at_most = self._settings.lifecycle.collect_at_most
        with transaction(self._engine) as session:
            rows = session.execute(running.where(Workload.id > self._collected).limit(at_most)).all()
            if len(rows) < at_most:
                first = running.where(Workload.id <= self._collected).limit(at_most - len(rows))
                rows = [*rows, *session.execute(first)]
        self._collected = rows[-1][0] if rows else ""
        return [(w, a) for w, a in rows]

    def _take(self, workload: str, attempt: int, beats: Sequence[Beat]) -> None:
        with transaction(self._engine) as session:
            row = session.get(Workload, workload)
            own = session.get(Attempt, (workload, attempt), with_for_update=True)
            if row is None or own is None or own.released_at is not None:
                return
            reported = own_progress(beats, own.plan["jobs"])
            progress = [p for reports in reported.values() for p in reports]
            saved_before = own.checkpoint_step
            set_progress(own, progress)
            set_preparing(own, {b.machine: b.said.preparing for b in beats if b.said is not None})
            set_bandwidth(own, [b.said.bandwidth for b in beats if b.said is not None and b.said.bandwidth])
            if own.checkpoint_step != saved_before:
                record_checkpoint(session, row, own)
            if row.phase != Phase.RUNNING or own.started_at is None:
                return
            limits = WorkloadSpec.model_validate(row.spec).limits
            limit_s = limits.max_silence_s
            if limit_s is None and own.launch_limit_s is None and own.launch_s is not None:
                return
            now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
            if lent_work.inspect(session, row, own, reported, now, limits) or limit_s is None:
                return
            mute_since_s = max((beat.since_s for beat in beats if not reported[beat.machine]), default=inf)
            heard = [p.active_at_s for p in progress if p.active_at_s is not None]
            if mute_since_s < inf:
                heard.append(mute_since_s)  # A machine that has the request for so long and reports nothing.
            elif not progress:
                return  # No machine has received the request.
            silent_s = now.timestamp() - max([*heard, own.started_at.timestamp()])
            if silent_s <= limit_s:
                return
            detail = {"silent_s": round(silent_s, 1), "limit_s": limit_s}
            told = events.record(
                session,
                "workload.hung",
                tenant=row.tenant,
                workload=workload,
                attempt=attempt,
                region=row.region,
                reason=Reason(ReasonCode.NO_PROGRESS, detail),
                dedup=f"{attempt}:hung",
            )
            if told:  # Sent only once, although later rounds find the hang until the workflow has handled it.
                outbox.message(session, workload, MessageKind.HUNG, attempt, **detail)


_EXPIRED = text(
    "select w.id, round(extract(epoch from now() - eligible.since))::bigint,"
    " (w.spec -> 'limits' ->> 'max_pending_s')::float8"
    " from workload as w left join attempt as a on a.workload = w.id and a.attempt = w.attempt"
    " cross join lateral (select greatest(coalesce(a.released_at, w.submitted_at), w.unheld_at) as since) as eligible"
    # The condition of the index `workload_expiring`.
    " where w.finished_at is null and w.spec -> 'limits' ->> 'max_pending_s' is not null"
    " and w.phase = any(:phases) and w.held_by is null and w.blocked is null"
    " and extract(epoch from now() - eligible.since)"
    " > (w.spec -> 'limits' ->> 'max_pending_s')::float8"
    " order by w.id for update of w skip locked"
)


def expire_pending(engine: Engine) -> list[str]:
    """Fails the workloads that have been eligible for too long; returns their ids.

    Held and blocked workloads do not expire, and the end of a pause starts the time again.
    """
    code = ReasonCode.PENDING_EXPIRED
    with transaction(engine) as session:
        found = session.execute(_EXPIRED, {"phases": sorted(QUEUED_PHASES)}).all()
        ending = {}
        for workload, waited_s, limit_s in found:
            detail = {"waited_s": waited_s, "limit_s": limit_s, "code": code.value}
            ending[workload] = Reason(code, detail), detail
        end_queued(session, Phase.FAILED, ending)
        return list(ending)
