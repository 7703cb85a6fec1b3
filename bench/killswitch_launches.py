"""The launch requests that an agent still reads after its owner took the machine: a part of the suite `killswitch`.

`mizzen up` runs in a separate process, and the agent of a machine with eight GPUs in this one. More workloads wait than
the machine can run, each for a quarter of a second, so launches arrive all the time. In each trial the owner takes the
machine back at a random time, through the owner's socket. The agent takes the time (`machine_at_s`) directly before the
switch. Every launch request (`node.prepare`, `node.run`) that its worker reads from then on is counted for `_WATCH_S`,
as the bytes of its input. None may start a task. The machine is then lent again.

    python -m bench.killswitch_launches --trials 5     # a short form
"""

import asyncio
import json
import logging
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from sqlalchemy import select
from temporalio import activity
from temporalio.client import Client, Interceptor
from temporalio.runtime import Runtime, TelemetryConfig
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput
from temporalio.worker import Interceptor as WorkerInterceptor

from agent.config import AgentConfig
from agent.host import serve
from bench import backlog
from bench.harness import InvalidBenchmark
from domain.ids import machine_id
from domain.protocol.activities import Activity
from infra.db.models import Machine, Workload
from infra.payloads import DATA_CONVERTER
from infra.temporal_client import connect

TRIALS = 20
GPUS = 8
_WATCH_S = 3.0
"""How long launches are counted after the switch. The agent's polls are open again for about half of it."""
_LAUNCHES = (Activity.PREPARE_NODE.value, Activity.RUN_NODE.value)
_PORTS = (23000, 23999)
_PATIENCE_S = 60.0


class _Count(Interceptor, WorkerInterceptor):
    """Counts the launch requests that a worker reads: when (seconds since the epoch), and how many bytes."""

    def __init__(self) -> None:
        self.read: list[tuple[float, int]] = []

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        """See the base class."""
        return _Counting(next, self.read)


class _Counting(ActivityInboundInterceptor):
    def __init__(self, inner: ActivityInboundInterceptor, read: list[tuple[float, int]]) -> None:
        super().__init__(inner)
        self._read = read

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        if activity.info().activity_type in _LAUNCHES:
            payloads = DATA_CONVERTER.payload_converter.to_payloads(input.args)
            self._read.append((time.time(), sum(len(payload.data) for payload in payloads)))
        return await super().execute_activity(input)


class _Agent:
    """The agent, in a thread of this process."""

    def __init__(self, stack: backlog.BacklogStack, folder: Path, exit_: ExitStack) -> None:
        self.count = _Count()
        self._stop = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self.config = AgentConfig(
            machine=machine_id("east", "lent", "m"), region="east", cluster="lent", rack="r", gpu_type="lent",
            gpus=GPUS, cpus_milli=16_000, memory_bytes=16 << 30, address="127.0.0.1", ports=_PORTS,
            bucket_url=(stack.data / "buckets" / "east").resolve().as_uri(), state_dir=folder / "agent",
            owner=str(os.getuid()),
        )  # fmt: skip

        async def connected() -> Client:
            plain: Any = (await connect(stack.temporal)).config()
            return Client(**plain | {"interceptors": [self.count]})

        thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(serve(self.config, connected, self._stop))
        )
        thread.start()
        exit_.callback(thread.join)
        exit_.callback(lambda: self._loop.call_soon_threadsafe(self._stop.set))

    def say(self, **request: Any) -> dict[str, Any]:
        """Sends the owner's request and waits for its end; returns the status."""
        status: dict[str, Any] = {}
        with socket.socket(socket.AF_UNIX) as owner:
            owner.settimeout(_PATIENCE_S)
            owner.connect(str(self.config.state_dir / "owner.sock"))
            owner.sendall(json.dumps(request).encode() + b"\n")
            for line in owner.makefile():
                body = json.loads(line)
                if "error" in body:
                    raise InvalidBenchmark(f"the agent refuses {request}: {body['error']}")
                if body.get("done"):
                    return status
                status = body.get("status", status)
        raise InvalidBenchmark(f"the agent does not complete {request}")


def _trial(stack: backlog.BacklogStack, agent: _Agent) -> int:
    """Returns the bytes of the launch requests that were read after the switch."""
    read = agent.count.read
    before = len(read)
    stack.until(lambda: len(read) >= before + GPUS, _PATIENCE_S)
    time.sleep(random.uniform(0.0, 0.5))
    at_s = agent.say(command="reclaim")["machine_at_s"]
    time.sleep(_WATCH_S)
    if running := agent.say(command="status")["running"]:
        raise InvalidBenchmark(f"{len(running)} workloads run on a machine that its owner has taken")
    found = sum(size for when_s, size in tuple(read) if when_s >= at_s)
    agent.say(command="lend")
    there = select(Machine.id).where(Machine.id == agent.config.machine)
    ready = there.where(Machine.state == "ready", Machine.cordon.is_(None))
    stack.until(lambda: stack.count(ready) == 1, _PATIENCE_S)
    return found


def _submit(stack: backlog.BacklogStack, ended: threading.Event) -> None:
    """Keeps workloads in the queue until `ended`."""
    resources = {"accelerators": "lent:1", "cpus": 0.1, "memory": "16MiB"}
    job = {"name": "main", "tasks": 1, "resources": resources, "run": "sleep 0.25"}
    pending = select(Workload.id).where(Workload.finished_at.is_(None))
    number = 0
    with stack.client() as client:
        while not ended.is_set():
            for _ in range(3 * GPUS - stack.count(pending)):
                number += 1
                client.submit({"version": 1, "name": f"w-{number}", "tenant": "t", "jobs": [job]})
            ended.wait(0.05)


def measure(say: Callable[[str], None], trials: int = TRIALS) -> list[int]:
    """Returns the bytes of the launch requests that were read after the switch in each trial."""
    # The SDK's core would write its warnings among the figures.
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=None)), error_if_already_set=False)
    logging.getLogger("temporalio.activity").setLevel(logging.ERROR)  # Each refused launch is a warning.
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name, ExitStack() as exit_:
        folder = Path(name)
        say("launches: starting the stack")
        stack = backlog.BacklogStack(folder, exit_)
        agent = _Agent(stack, folder, exit_)
        ready = select(Machine.id).where(Machine.id == agent.config.machine, Machine.state == "ready")
        stack.until(lambda: stack.count(ready) == 1)
        with stack.client() as client:
            client.set_tenant("t", 3, {"lent": GPUS}, None)
        ended = threading.Event()
        submitting = threading.Thread(target=_submit, args=(stack, ended))
        submitting.start()
        found = []
        try:
            for number in range(trials):
                say(f"launches: {number} of {trials} trials")
                found.append(_trial(stack, agent))
        finally:
            ended.set()
            submitting.join()
    return found


@click.command()
@click.option("--trials", default=TRIALS, help="Number of trials.")
def main(trials: int) -> None:
    """Measures, and prints the bytes of each trial."""
    print(*measure(lambda text: click.echo(text, err=True), trials))


if __name__ == "__main__":
    main()
