"""A volunteer's machine that registers, accepts every request, sends heartbeats, and does nothing."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from temporalio import activity
from temporalio.worker import Worker

from agent.registration import HELLO_SIGNAL, MACHINE_WORKFLOW
from agent.sealed import new_key, public_key
from domain.ids import CONTROL_QUEUE, agent_queue, machine_workflow_id
from domain.protocol.activities import Activity
from domain.protocol.machines import Hello
from infra.config.services import TemporalSettings
from infra.temporal_client import connect

_KEY = public_key(new_key())
"""The same for each start in this process, as on the disk of a machine."""


async def _for_ever() -> None:
    while True:
        activity.heartbeat()
        await asyncio.sleep(0.5)


@activity.defn(name=Activity.PREPARE_NODE.value)
async def _prepare(_request: Any) -> None:
    await _for_ever()


@activity.defn(name=Activity.RUN_NODE.value)
async def _run(_request: Any) -> None:
    await _for_ever()


@activity.defn(name=Activity.STOP_NODE.value)
async def _stop(_request: Any) -> None:
    await _for_ever()


@activity.defn(name=Activity.ATTEND.value)
async def _attend(_request: Any) -> None:
    await _for_ever()


async def _idle_if_possible(temporal: TemporalSettings, hello: Hello, over: asyncio.Event) -> None:
    with contextlib.suppress(Exception):  # Temporal may be down, or the key revoked: then nobody sees the machine.
        await _idle(temporal, hello, over)


async def _idle(temporal: TemporalSettings, hello: Hello, over: asyncio.Event) -> None:
    client = await connect(temporal)
    await client.start_workflow(
        MACHINE_WORKFLOW,
        hello.machine,
        id=machine_workflow_id(hello.machine),
        task_queue=CONTROL_QUEUE,
        start_signal=HELLO_SIGNAL,
        start_signal_args=[hello],
    )
    work = [_prepare, _run, _stop, _attend]
    async with Worker(client, task_queue=agent_queue(hello.machine), activities=work):
        await over.wait()


@contextlib.contextmanager
def idler(temporal: TemporalSettings, machine: str, gpus: int, gpu_type: str) -> Iterator[None]:
    """Runs such a machine in a thread. It claims `gpus` GPUs, and connects with its own key."""
    region, cluster, _ = machine.split("/")
    hello = Hello(machine, region, cluster, "r0", gpu_type, gpus, 64_000, 1 << 38, "127.0.0.1", "boot", _KEY)
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    running = threading.Thread(target=lambda: loop.run_until_complete(_idle_if_possible(temporal, hello, over)))
    running.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        running.join(30)
        loop.close()
