"""Readiness of replicas: from the heartbeats of their agents to the rows of the replicas."""

import asyncio
import math
import time
from collections.abc import Sequence

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio.client import Client

from activities.leader import Leader, lead
from activities.lifecycle.beats import Beat, for_each, own_progress, read_beats
from domain.addresses import is_host, is_port
from domain.phases import Phase
from domain.task_reports import ServingReport
from infra.config.settings import Settings
from infra.db import outbox
from infra.db.models import Attempt, Workload
from infra.db.services import ServiceReplica
from infra.db.session import in_thread, transaction

_SEARCH_S = 1.0
"""Interval of the search for starting replicas while there are none. Clients may wait for the first one."""
_ROUND_S = 60.0
"""The leader checks after this time that it still is the leader."""
_MOST_ERROR_CHARACTERS = 500


class ReadinessReader:
    """Reads the readiness of starting replicas often. That of others is read with the progress of all workloads."""

    def __init__(self, engine: Engine, settings: Settings, client: Client) -> None:
        self._engine = engine
        self._interval_s = settings.services.readiness_interval_s
        self._client = client

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(self._engine, Leader.READINESS, "readiness", self.round, max(_SEARCH_S, self._interval_s))

    async def round(self) -> None:
        """Reads the readiness of starting replicas, again and again while there are any."""
        until_s = time.monotonic() + _ROUND_S
        while (starting := await in_thread(self._starting)) and time.monotonic() < until_s:
            await for_each(starting, self._one)
            await asyncio.sleep(self._interval_s)

    async def _one(self, workload: str) -> None:
        await in_thread(record_readiness, self._engine, workload, await read_beats(self._client, workload))

    def _starting(self) -> Sequence[str]:
        """Returns the workloads of replicas that run or are about to, and are not ready."""
        with transaction(self._engine) as session:
            return session.scalars(
                select(ServiceReplica.workload)
                .join(Workload, Workload.id == ServiceReplica.workload)
                .where(
                    ServiceReplica.ended_at.is_(None),
                    ServiceReplica.ending_at.is_(None),
                    ServiceReplica.ready.is_(False),
                    Workload.phase.in_([Phase.PLACING.value, Phase.PROVISIONING.value, Phase.RUNNING.value]),
                )
            ).all()


def record_readiness(engine: Engine, workload: str, beats: Sequence[Beat]) -> None:
    """Writes whether a replica is ready, as the agents of its workload report it. Signals its service of a change.

    A machine only reports the tasks that are placed on it. A report with an address or port that cannot be one is
    ignored: the balancer refuses the whole list of a service that contains it. The transaction holds no other lock: a
    decision about the service locks its replicas, and then workloads.
    """
    if not any(p.serving for beat in beats if beat.said is not None for p in beat.said.progress):
        return
    placed = select(Attempt.plan).join(
        Workload, (Workload.id == Attempt.workload) & (Workload.attempt == Attempt.attempt)
    )
    with transaction(engine) as session:
        plan = session.scalar(placed.where(Workload.id == workload))
        told = {} if plan is None else own_progress(beats, plan["jobs"])
        reports = [p.serving for own in told.values() for p in own if p.serving is not None]
        report = next((one for one in reports if _is_endpoint(one)), None)
        if report is None:
            return
        row = session.scalar(
            select(ServiceReplica)
            .where(ServiceReplica.workload == workload, ServiceReplica.ended_at.is_(None))
            .with_for_update()
        )
        if row is not None and _changed(row, report):
            _write(session, row, report)


def _is_endpoint(report: ServingReport) -> bool:
    return is_host(report.address) and is_port(report.port)


def _changed(row: ServiceReplica, report: ServingReport) -> bool:
    error = None if report.error is None else report.error[:_MOST_ERROR_CHARACTERS]
    before = (row.ready, row.address, row.port, row.probe_error, row.load)
    return before != (report.ready, report.address, report.port, error, _load(report))


def _load(report: ServingReport) -> float | None:
    """Returns the load of a report, if it can be one."""
    return report.load if report.load is not None and 0 <= report.load < math.inf else None


def _write(session: Session, row: ServiceReplica, report: ServingReport) -> None:
    moved = (row.ready, row.address, row.port) != (report.ready, report.address, report.port)
    row.address, row.port, row.load = report.address, report.port, _load(report)
    row.probe_error = None if report.error is None else report.error[:_MOST_ERROR_CHARACTERS]
    if row.ready != report.ready:
        row.ready = report.ready
        row.ready_changed_at = func.now()  # The time of the database, because the machine's may be wrong.
    if moved:
        outbox.service(session, row.service)
