"""The outbox's other end: delivers mail to Temporal after the transaction that made it true, at least once."""

import asyncio
import logging
from typing import Any

import psycopg
from sqlalchemy import Engine, func, select, update
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from domain import ids
from domain.phases import PLACED_PHASES
from domain.protocol import Mail, ReplicateTable, WorkloadInput
from infra.db.models import Outbox, Workload
from infra.db.outbox import CHANNEL
from infra.db.session import transaction

_log = logging.getLogger(__name__)
_BATCH = 200
_AT_ONCE = 16
_POLL_S = 2.0
"""Mail that a notification did not announce (its listener was reconnecting) is found this soon."""


class Dispatcher:
    """Delivers mail. Several may run at once: each takes rows that no other has locked, in the order of their ids."""

    def __init__(self, engine: Engine, database_url: str, client: Client) -> None:
        self._engine = engine
        self._url = database_url
        self._client = client
        self._due = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled. Postgres or Temporal being away delays mail, and loses none."""
        listener = asyncio.create_task(self._listen())
        try:
            while True:
                self._due.clear()
                try:
                    while await self._deliver_batch():
                        pass
                except Exception as error:
                    _log.warning("outbox: %s; trying again", error)
                    await asyncio.sleep(0.5)
                try:
                    await asyncio.wait_for(self._due.wait(), _POLL_S)
                except TimeoutError:
                    continue
        finally:
            listener.cancel()

    async def _listen(self) -> None:
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
                    await connection.execute(f"listen {CHANNEL}")
                    async for _ in connection.notifies():
                        self._due.set()
            except psycopg.Error:
                await asyncio.sleep(1.0)

    async def _deliver_batch(self) -> bool:
        """Delivers what is due; whether there may be more at once."""
        rows = await asyncio.to_thread(self._claim)
        if not rows:
            return False
        gate = asyncio.Semaphore(_AT_ONCE)
        by_target: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_target.setdefault(row["workload"] or row["kind"], []).append(row)
        done: list[int] = []

        async def target(mails: list[dict[str, Any]]) -> None:
            """One receiver's mail, in order; what cannot be delivered now holds back what follows it."""
            async with gate:
                if mails[0]["kind"] == "wake":
                    await self._wake()
                    done.extend(m["id"] for m in mails)
                    return
                for mail in mails:
                    await self._deliver(mail)
                    done.append(mail["id"])

        results = await asyncio.gather(*(target(m) for m in by_target.values()), return_exceptions=True)
        await asyncio.to_thread(self._mark, done)
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            raise errors[0]
        return len(rows) == _BATCH

    def _claim(self) -> list[dict[str, Any]]:
        """Due rows. Not locked while they are delivered: two dispatchers may deliver one twice, and receivers know."""
        with transaction(self._engine) as session:
            rows = session.scalars(
                select(Outbox).where(Outbox.delivered_at.is_(None)).order_by(Outbox.id).limit(_BATCH)
            )
            return [{"id": r.id, "kind": r.kind, "workload": r.workload, "body": r.body} for r in rows]

    def _mark(self, done: list[int]) -> None:
        if done:
            with transaction(self._engine) as session:
                session.execute(update(Outbox).where(Outbox.id.in_(done)).values(delivered_at=func.now()))

    async def _wake(self) -> None:
        await self._client.start_workflow(
            "SchedulerWorkflow",
            id=ids.SCHEDULER_WORKFLOW_ID,
            task_queue=ids.CONTROL_QUEUE,
            start_signal="wake",
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
        )

    async def _deliver(self, row: dict[str, Any]) -> None:
        if row["kind"] == "start":
            await self._start(WorkloadInput(row["workload"], **row["body"]))
        elif row["kind"] == "replicate":
            await self._replicate(row["body"])
        else:
            await self._mail(row)

    async def _start(self, state: WorkloadInput) -> None:
        if await asyncio.to_thread(self._state, state.workload_id) is None:
            return
        try:
            await self._client.start_workflow(
                "WorkloadWorkflow",
                state,
                id=ids.workload_workflow_id(state.workload_id),
                task_queue=ids.CONTROL_QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            )
        except WorkflowAlreadyStartedError:
            return

    def _state(self, workload: str) -> WorkloadInput | None:
        """Where a workload is by what Postgres says; None: it has ended already."""
        with transaction(self._engine) as session:
            row = session.get(Workload, workload)
            if row is None or row.finished_at is not None:
                return None
            return WorkloadInput(workload_id=workload, attempt=row.attempt, placed=row.phase in PLACED_PHASES)

    async def _mail(self, row: dict[str, Any]) -> None:
        body = row["body"]
        mail = Mail(id=row["id"], kind=body["kind"], attempt=body["attempt"], detail=body["detail"])
        handle = self._client.get_workflow_handle(ids.workload_workflow_id(row["workload"]))
        try:
            await handle.signal("mail", mail)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            # It ended meanwhile, or its state is lost: then a new one carries on from what Postgres says.
            state = await asyncio.to_thread(self._state, row["workload"])
            if state is not None:
                await self._start(state)
                await handle.signal("mail", mail)

    async def _replicate(self, body: dict[str, Any]) -> None:
        request = ReplicateTable(body["table"], body["source"], body["target"])
        try:
            await self._client.start_workflow(
                "ReplicaWorkflow",
                request,
                id=ids.replica_workflow_id(request.table, request.target_region),
                task_queue=ids.CONTROL_QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            )
        except WorkflowAlreadyStartedError:
            return
