"""Delivers the outbox: sends its messages to Temporal, at least once, after the transaction that wrote them.

Messages to one receiver are delivered in order. A message that cannot be delivered now blocks later messages to the
same receiver only. A malformed row is marked as delivered, and an error is logged.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Engine, Text, case, cast, func, select, update
from sqlalchemy.exc import DBAPIError
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.capacity.instance_start import read_instance, start_instance
from activities.lifecycle.bundles import read_bundles, start_bundle
from activities.lifecycle.workload_start import read_start, start_workflow
from activities.scheduling.rate_limits import LoopPace
from activities.workflow_start import ensure_workflow
from domain import ids
from domain.protocol.bundles import FIRST_ATTEMPT, Bundle
from domain.protocol.data import ON_DEMAND, ReplicateTable, Scrub
from domain.protocol.services import ServiceRef
from domain.protocol.sessions import OpenSession
from domain.protocol.workload_messages import MessageKind, WorkloadMessage
from infra.config.scheduling import CapacitySettings, SchedulerSettings
from infra.db import notifications
from infra.db.array_rows import end_array
from infra.db.logs import Outbox
from infra.db.notifications import notified
from infra.db.outbox import CHANNEL
from infra.db.session import in_db, in_thread, transaction

_log = logging.getLogger(__name__)
_BATCH = 200
_AT_ONCE = 16
_POLL_S = 5.0
"""The poll interval, for messages whose notification was lost while the listener reconnected."""
_IN_VAIN_S = 0.03
"""The pause after a notification without due message. While the scheduler's wakes are rate-limited, every change sends
one."""
_REST_S = 1.0
_SCHEDULER = SchedulerSettings()
_CAPACITY = CapacitySettings()
_LONGEST_REST_S = 60.0
"""The maximum backoff for a receiver that refuses its message. It starts at `_REST_S` and doubles."""
_AWAY = frozenset({RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.RESOURCE_EXHAUSTED})
_RECEIVER = func.coalesce(Outbox.workload, case((Outbox.kind == "wake", "wake"), else_=cast(Outbox.id, Text)))
"""The receiver of a row: a workload, the scheduler, or, for other kinds, a receiver of this row only."""


@dataclass(frozen=True)
class _Row:
    id: int
    receiver: str
    kind: str
    workload: str | None
    body: dict[str, Any]


@dataclass
class _Rest:
    until_s: float
    """On the monotonic clock."""
    length_s: float


def _is_first_award(row: _Row) -> bool:
    body = row.body
    return row.kind == "mail" and (body.get("kind"), body.get("attempt")) == (MessageKind.AWARDED.value, FIRST_ATTEMPT)


class _Undeliverable(Exception):
    """A malformed row, which can never be delivered."""


class Dispatcher:
    """Delivers the messages of the outbox to workflows. Concurrent ones may deliver one twice; receivers drop it."""

    def __init__(
        self,
        engine: Engine,
        database_url: str,
        client: Client,
        alive: Callable[[], None] = lambda: None,
        scheduler: SchedulerSettings = _SCHEDULER,
        capacity: CapacitySettings = _CAPACITY,
    ) -> None:
        """`alive` is called before each read of the outbox, and after each delivery.

        The settings limit the rate at which the scheduler is woken. A pass sees all changes that were committed before
        it, and costs the same for one change as for many.
        """
        self._pace = LoopPace(scheduler.wake_interval_s, scheduler.wakes_per_s)
        self._capacity = capacity
        self._engine = engine
        self._alive = alive
        self._url = database_url
        self._client = client
        self._due = asyncio.Event()
        self._resting: dict[str, _Rest] = {}

    async def run(self) -> None:
        """Runs until cancelled. If Postgres or Temporal does not answer, messages are delayed but not lost."""
        listener = asyncio.create_task(self._listen())
        try:
            while True:
                announced = self._due.is_set()
                self._due.clear()
                try:
                    found = await self._deliver_batch()
                    if announced and not found:
                        await asyncio.sleep(_IN_VAIN_S)
                    while found == _BATCH:
                        found = await self._deliver_batch()
                except Exception as error:
                    _log.warning("outbox: %s; trying again", error)
                    await asyncio.sleep(0.5)
                try:
                    async with asyncio.timeout(self._until_due_s()):
                        await self._due.wait()
                except TimeoutError:
                    continue
        finally:
            listener.cancel()
            await asyncio.wait([listener])

    def _until_due_s(self) -> float:
        """Returns the seconds until the next poll: less than usual if a wake of the scheduler may be due earlier."""
        wake = self._resting.get("wake")
        return _POLL_S if wake is None else min(_POLL_S, max(0.01, wake.until_s - time.monotonic()))

    async def _listen(self) -> None:
        while True:
            try:
                async with await notifications.connect(self._url) as connection:
                    await connection.execute(f"listen {CHANNEL}")
                    while True:
                        self._due.set()  # In the first round, finds messages from before this connection listened.
                        await notified(connection)
            except psycopg.Error:
                await asyncio.sleep(1.0)

    async def _deliver_batch(self) -> int:
        """Delivers due messages, at most `_BATCH` rows; returns the number of rows."""
        now_s = time.monotonic()
        self._alive()
        if (wake := self._resting.get("wake")) is not None and wake.until_s <= now_s and wake.length_s < _REST_S:
            del self._resting["wake"]
        rows = await in_thread(self._claim, [who for who, rest in self._resting.items() if rest.until_s > now_s])
        gate = asyncio.Semaphore(_AT_ONCE)
        by_receiver: dict[str, list[_Row]] = {}
        for row in rows:
            by_receiver.setdefault(row.receiver, []).append(row)
        done = await self._start_bundles(
            [m for messages in by_receiver.values() if len(messages) == 1 for m in messages]
        )
        started = set(done)
        by_receiver = {who: messages for who, messages in by_receiver.items() if messages[0].id not in started}

        async def deliver_all(receiver: str, messages: list[_Row]) -> None:
            async with gate:
                if receiver == "wake":
                    await self._wake()  # One wake stands for all of them.
                    done.extend(m.id for m in messages)
                    return
                for message in messages:
                    try:
                        await self._deliver(message)
                    except _Undeliverable as error:
                        _log.error("outbox: row %d is malformed and is set aside: %s", message.id, error)
                    done.append(message.id)
                    self._alive()

        results = await asyncio.gather(*(deliver_all(*r) for r in by_receiver.items()), return_exceptions=True)
        await in_thread(self._mark, done)
        for receiver, failure in zip(by_receiver, results, strict=True):
            self._note(receiver, failure)
        return len(rows)

    def _note(self, receiver: str, failure: BaseException | None) -> None:
        """Applies a backoff to a receiver that refused a message, and resets it after a success.

        Raises:
            Exception: the failure, if Temporal or Postgres does not answer. That is not a refusal by the receiver.
        """
        if failure is None:
            self._resting.pop(receiver, None)
            if receiver == "wake":
                self._resting["wake"] = _Rest(self._pace.take(time.monotonic()), _REST_S / 2)
            return
        away = failure.status in _AWAY if isinstance(failure, RPCError) else isinstance(failure, DBAPIError)
        if away or not isinstance(failure, Exception):
            raise failure
        before = self._resting.get(receiver)
        length_s = _REST_S if before is None else min(2 * before.length_s, _LONGEST_REST_S)
        self._resting[receiver] = _Rest(time.monotonic() + length_s, length_s)
        _log.warning("outbox: %s: %s; trying again in %.0f s", receiver, failure, length_s)

    def _claim(self, resting: list[str]) -> list[_Row]:
        """Returns due rows, oldest first. They are not locked: no transaction stays open during a network call."""
        with transaction(self._engine, isolation="AUTOCOMMIT") as session:
            due = select(Outbox, _RECEIVER).where(Outbox.delivered_at.is_(None))
            if resting:
                due = due.where(_RECEIVER.not_in(resting))
            rows = session.execute(due.order_by(Outbox.id).limit(_BATCH))
            return [_Row(row.id, receiver, row.kind, row.workload, row.body) for row, receiver in rows]

    def _mark(self, done: list[int]) -> None:
        if done:
            with transaction(self._engine, isolation="AUTOCOMMIT") as session:
                session.execute(update(Outbox).where(Outbox.id.in_(done)).values(delivered_at=func.now()))

    async def _wake(self) -> None:
        await ensure_workflow(self._client, "SchedulerWorkflow", ids.SCHEDULER_WORKFLOW_ID, signal="wake")

    async def _deliver(self, row: _Row) -> None:
        body = row.body
        try:
            if row.kind == "start" and row.workload is not None:
                deliver: Coroutine[Any, Any, object] = self._start(row.workload)
            elif row.kind == "mail" and row.workload is not None:
                message = WorkloadMessage(
                    row.id, MessageKind(body["kind"]).value, int(body["attempt"]), dict(body["detail"])
                )
                deliver = self._message(row.workload, message)
            elif row.kind == "replicate":
                asked = ReplicateTable(body["table"], body["source"], body["target"], body.get("share", ON_DEMAND))
                deliver = self._replicate(asked)
            elif row.kind == "placement_run":
                deliver = self._placement_run(str(body["placement_run"]))
            elif row.kind == "scrub":
                deliver = start_scrub(self._client, str(body["region"]))
            elif row.kind == "instance":
                deliver = self._instance(str(body["instance"]))
            elif row.kind == "service":
                deliver = self._service(str(body["service"]))
            elif row.kind == "session":
                deliver = self._session(OpenSession(**body))
            elif row.kind == "array":
                deliver = in_db(self._engine, end_array, str(body["array"]))
            elif row.kind == "unconfirmed":
                grace_s = float(body.get("grace_s", 0.0))
                deliver = self._unconfirmed(ids.machine_workflow_id(body["machine"]), str(body["run"]), grace_s)
            else:
                raise ValueError(f"kind {row.kind!r} for workload {row.workload!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise _Undeliverable(f"{type(error).__name__}: {error}") from error
        await deliver

    async def _start_bundles(self, messages: Sequence[_Row]) -> list[int]:
        """Starts workflows that each run several workloads which were just awarded; returns the ids of their messages.

        Other messages, and those of a bundle which an earlier delivery has started or which Temporal refuses, are
        delivered to each workload.

        Raises:
            RPCError: Temporal does not answer.
        """
        awards = {m.workload: m.id for m in messages if m.workload is not None and _is_first_award(m)}
        bundles = await in_db(self._engine, read_bundles, list(awards)) if len(awards) > 1 else []

        async def start(bundle: Bundle) -> list[int]:
            ids_ = [awards[workload] for workload in bundle.workloads]
            try:
                is_new = await start_bundle(self._client, ids.bundle_workflow_id(min(ids_)), bundle)
            except RPCError as error:
                if error.status in _AWAY:
                    raise
                _log.warning("outbox: a bundle on %s is refused: %s", bundle.machine, error)
                return []
            return ids_ if is_new else []

        return [id_ for ids_ in await asyncio.gather(*map(start, bundles)) for id_ in ids_]

    async def _start(self, workload: str) -> bool | None:
        """Starts a live workload's workflow; returns False if it already runs, and None if the workload has ended.

        The workflow starts from the current state in Postgres, which may be newer than the message.
        """
        start = await in_db(self._engine, read_start, workload)
        return None if start is None else await start_workflow(self._client, start)

    async def _message(self, workload: str, message: WorkloadMessage) -> None:
        # A workload that was never placed has no workflow. The first award starts it, with its attempt placed.
        is_first = message.kind == MessageKind.AWARDED and message.attempt == 1
        if is_first and await self._start(workload) is not False:
            return
        handle = self._client.get_workflow_handle(ids.workload_workflow_id(workload))
        try:
            await handle.signal("mail", message)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            # The workload has ended, or Temporal lost the workflow. In that case a new one continues from Postgres.
            if await self._start(workload) is not None:
                await handle.signal("mail", message)

    async def _unconfirmed(self, machine_workflow: str, run: str, grace_s: float) -> None:
        try:
            await self._client.get_workflow_handle(machine_workflow).signal("unconfirmed", args=[run, grace_s])
        except RPCError as error:
            # The machine has no workflow. Its agent will announce itself again, and registering reads Postgres.
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise

    async def _placement_run(self, placement_run: str) -> None:
        summary = "plans the placement of tables and moves them"
        await ensure_workflow(self._client, "PlacementRunWorkflow", placement_run, signal="refresh", summary=summary)

    async def _instance(self, instance: str) -> None:
        start = await in_db(self._engine, read_instance, instance, self._capacity)
        if start is not None:
            await start_instance(self._client, start)

    async def _service(self, service: str) -> None:
        """Starts a service's workflow, or signals the running one to decide again.

        If the service has ended, the workflow ends at once.
        """
        await ensure_workflow(
            self._client,
            "ServiceWorkflow",
            ids.service_workflow_id(service),
            ServiceRef(service),
            signal="refresh",
            summary="keeps the replicas of a service",
        )

    async def _session(self, request: OpenSession) -> None:
        await ensure_workflow(
            self._client,
            "SessionWorkflow",
            request.session,
            request,
            summary=f"session in {request.workload_id} on {request.machine}",
        )

    async def _replicate(self, request: ReplicateTable) -> None:
        """Starts the copy workflow, or signals the running one to check for missing partitions again at its end."""
        await ensure_workflow(
            self._client,
            "ReplicaWorkflow",
            ids.replica_workflow_id(request.table, request.target_region),
            request,
            signal="asked",
            summary=f"table {request.table} to region {request.target_region}",
        )


async def start_scrub(client: Client, region: str) -> None:
    """Starts a region's verification workflow, or signals the running one to look for due checks."""
    await ensure_workflow(client, "ScrubWorkflow", ids.scrub_workflow_id(region), Scrub(region), signal="refresh")
