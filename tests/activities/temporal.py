"""Reads what workflows on a real Temporal server received, and provides a proxy that can cut connections."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine, func, select
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.lifecycle.dispatch import Dispatcher
from domain.ids import SCHEDULER_WORKFLOW_ID, workload_workflow_id
from infra.db.logs import Outbox
from infra.db.session import transaction


async def until(holds: Callable[[], Any], what: str, patience_s: float = 30.0) -> Any:
    """Waits until `holds`, which may block, returns a true value; returns that value."""
    give_up_s = asyncio.get_running_loop().time() + patience_s
    while not (answer := await asyncio.to_thread(holds)):
        assert asyncio.get_running_loop().time() < give_up_s, f"timed out waiting until {what}"
        await asyncio.sleep(0.05)
    return answer


async def end_all(client: Client) -> None:
    """Terminates all running workflows of the server."""
    async for execution in client.list_workflows('ExecutionStatus = "Running"'):
        with contextlib.suppress(RPCError):
            await client.get_workflow_handle(execution.id).terminate()
    with contextlib.suppress(RPCError):
        await client.get_workflow_handle(SCHEDULER_WORKFLOW_ID).terminate()


@dataclass
class Told:
    """What a workflow received: its start argument, and its signals in order."""

    state: Any = None
    mails: list[dict[str, Any]] = field(default_factory=list)
    wakes: int = 0


async def told(client: Client, workflow_id: str) -> Told | None:
    """Reads what the newest run of a workflow received, from its history; None: no such workflow exists."""
    out = Told()
    try:
        history = await client.get_workflow_handle(workflow_id).fetch_history()
    except RPCError as error:
        assert error.status is RPCStatusCode.NOT_FOUND
        return None
    for event in history.events:
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED:
            payloads = event.workflow_execution_started_event_attributes.input.payloads
            out.state = json.loads(payloads[0].data) if payloads else None
        elif event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED:
            signal = event.workflow_execution_signaled_event_attributes
            if signal.signal_name == "wake":
                out.wakes += 1
            elif signal.signal_name == "mail":
                out.mails.append(json.loads(signal.input.payloads[0].data))
    return out


async def told_workload(client: Client, workload: str) -> Told:
    """Reads what a workload's workflow received; it must have been started."""
    found = await told(client, workload_workflow_id(workload))
    assert found is not None, f"the workflow of {workload} was never started"
    return found


def undelivered(engine: Engine) -> int:
    """Returns the number of undelivered outbox rows."""
    with transaction(engine) as session:
        return int(session.scalar(select(func.count()).select_from(Outbox).where(Outbox.delivered_at.is_(None))) or 0)


@contextlib.asynccontextmanager
async def dispatching(engine: Engine, url: str, client: Client) -> AsyncIterator[None]:
    """Runs a dispatcher while the context is open."""
    task = asyncio.create_task(Dispatcher(engine, url, client).run())
    try:
        yield
        assert not task.done(), "the dispatcher ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Door:
    """A TCP proxy in front of a server; while it is shut, connections fail."""

    def __init__(self, target: tuple[str, int], port: int) -> None:
        self.port = port
        self._target = target
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Starts to accept connections."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)

    async def shut(self) -> None:
        """Aborts open connections and refuses new ones."""
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        self._server = None

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._open |= {writer, back}
        await asyncio.gather(_pump(reader, back), _pump(there, writer))
        self._open -= {writer, back}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
