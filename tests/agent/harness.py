"""What the agent's tests share: launch descriptions, run folders, and a workflow that calls activities."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from agent import shim, tasks
from agent.config import AgentConfig
from agent.host import serve
from agent.launch import TaskLaunch
from agent.tasks import RunFolder
from domain.ids import CONTROL_QUEUE, agent_queue, launch_key, log_prefix
from domain.launch import LaunchDescription
from domain.protocol import Activity, NodeOutcome, NodePrepared, PrepareNode, RunNode, StopNode
from infra.config import TemporalSettings
from infra.stack.temporal import DYNAMIC_CONFIG
from infra.temporal_client import connect
from mizzen.objects import open_store


def processes_of(folder: Path) -> list[int]:
    """Living processes, other than this one, with the folder in their command line or environment."""
    mark = os.fsencode(folder)
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                    found.append(int(path.name))
    return sorted(found)


def zygotes(of: int | None = None) -> set[int]:
    """Living zygotes of a process, by default of this one."""
    parent, table = os.getpid() if of is None else of, shim.process_table()
    children = [pid for pid, (state, above, _) in table.items() if above == parent and state not in "ZX"]
    return {pid for pid in children if shim.process_name(pid) == "mizzen-zygote"}


def until(holds: Callable[[], Any], patience_s: float = 20.0) -> Any:
    """Wait for a truthy answer of `holds`, and return it."""
    give_up_s = time.monotonic() + patience_s
    while not (answer := holds()):
        assert time.monotonic() < give_up_s, "it never came true"
        time.sleep(0.02)
    return answer


async def until_async(holds: Callable[[], Any], patience_s: float = 20.0) -> Any:
    """The same beside a running event loop."""
    return await asyncio.to_thread(until, holds, patience_s)


@contextlib.contextmanager
def dev_server(port: int) -> Iterator[None]:
    """A Temporal dev server, in memory."""
    binary = shutil.which("temporal") or str(Path(sys.executable).parent / "temporal")
    process = subprocess.Popen(
        [binary, "server", "start-dev", "--headless", "--port", str(port), "--log-level", "error", *DYNAMIC_CONFIG],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def serves() -> bool:
        assert process.poll() is None, "the dev server ended"
        # Not its port alone: it listens, and refuses calls as "not healthy yet", before it serves.
        asked = [binary, "operator", "cluster", "health", "--address", f"127.0.0.1:{port}"]
        return subprocess.run(asked, capture_output=True, timeout=30, check=False).returncode == 0

    try:
        until(serves, 60.0)
        yield
    finally:
        process.kill()
        process.wait()


def run_of(root: Path, job: str = "main", task: int = 0) -> RunFolder:
    """A task whose folder is in `root`, of a workload that no other `root` has.

    Tests run beside one another, and closing the books of a lost task kills whatever has its run id on this machine.
    """
    return RunFolder(root / f"{job}.{task}", f"wl-{sha256(os.fsencode(root)).hexdigest()[:12]}", 1, job, task)


def run_folder(root: Path, job: str = "main", task: int = 0) -> RunFolder:
    """An empty folder for a task."""
    run = run_of(root, job, task)
    run.work.mkdir(parents=True)
    run.report.parent.mkdir()
    return run


def task_launch(run: RunFolder, *argv: str, grace_s: float = 5.0, **more: Any) -> TaskLaunch:
    """The launch of `argv` in a run's folder."""
    env = {"PATH": os.environ["PATH"], "HOME": str(run.work), "MIZZEN_RUN_ID": run.run_id}
    return TaskLaunch(argv=argv, env=env, cwd=str(run.work), output=str(run.output), grace_s=grace_s, **more)


def python(run: RunFolder, code: str, **more: Any) -> TaskLaunch:
    """The launch of a Python program."""
    return task_launch(run, sys.executable, "-I", "-S", "-c", code, **more)


def ended(run: RunFolder) -> tasks.Exit:
    """How the task ended, once it has."""
    exit_ = until(lambda: run.exit())
    assert isinstance(exit_, tasks.Exit)
    return exit_


PYTHON = f"{sys.executable} -I -S -u"
"""Starts Python quickly."""

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for generation in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(60)
        while True:
            time.sleep(60)
print("ready", flush=True)
while True:
    time.sleep(60)
"""
"""Ignores SIGTERM, and has children and grandchildren in sessions of their own that do, too."""


# ----------------------------------------------------------------------------------------------------- with Temporal


@dataclass
class Call:
    """An activity to call on a machine's queue."""

    activity: str
    machine: str
    body: Any
    heartbeat_timeout_s: float
    attempts: int


@workflow.defn(name="AgentTestCall")
class CallWorkflow:
    """Calls one activity and returns what it returned."""

    @workflow.run
    async def run(self, call: Call) -> Any:
        return await workflow.execute_activity(
            call.activity,
            call.body,
            task_queue=agent_queue(call.machine),
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=call.heartbeat_timeout_s),
            retry_policy=RetryPolicy(initial_interval=timedelta(seconds=0.2), maximum_attempts=call.attempts),
        )


@workflow.defn(name="MachineWorkflow")
class HelloWorkflow:
    """Remembers what agents say at their start."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []

    @workflow.run
    async def run(self, machine: str) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal
    def hello(self, hello: dict[str, Any]) -> None:
        self.heard.append(hello)

    @workflow.signal
    def noticed(self, notice: dict[str, Any]) -> None:
        self.told.append(notice)

    @workflow.query
    def notices(self) -> list[dict[str, Any]]:
        return self.told

    @workflow.query
    def hellos(self) -> list[dict[str, Any]]:
        return self.heard


def _key(launch: LaunchDescription) -> str:
    """One key for an attempt, whatever its description says: tests change what is there."""
    return launch_key(launch.workload_id, launch.attempt, "0" * 64)


@dataclass
class Lab:
    """One test's bucket, client and worker."""

    folder: Path
    temporal: TemporalSettings
    client: Client
    queue: str
    region: str = field(default_factory=lambda: f"r{uuid.uuid4().hex[:8]}")

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: Path, address: str) -> AsyncIterator["Lab"]:
        """A lab whose workflows run in this process."""
        settings = TemporalSettings(address=address)
        client = await connect(settings)
        lab = cls(folder, settings, client, f"test-{uuid.uuid4().hex}")
        runner = UnsandboxedWorkflowRunner()
        async with (
            Worker(client, task_queue=lab.queue, workflows=[CallWorkflow], workflow_runner=runner),
            Worker(client, task_queue=CONTROL_QUEUE, workflows=[HelloWorkflow], workflow_runner=runner),
        ):
            yield lab

    @property
    def bucket_url(self) -> str:
        """The region's bucket."""
        return f"file://{self.folder}/bucket"

    def config(self, name: str = "m1", **changes: Any) -> AgentConfig:
        """A machine of the region, with a port range that hardly anything uses."""
        base = {
            "machine": f"{self.region}/c/{name}",
            "region": self.region,
            "cluster": "c",
            "rack": "rack-1",
            "cpus_milli": 2000,
            "memory_bytes": 1 << 30,
            "address": "127.0.0.1",
            "ports": (21000, 21099),
            "state_dir": self.folder / "state" / name,
        }
        return AgentConfig.model_validate(base | changes)

    @contextlib.asynccontextmanager
    async def agent(self, config: AgentConfig) -> AsyncIterator[None]:
        """An agent in this process; it detaches at the end."""
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(config, lambda: connect(self.temporal), stop))
        try:
            yield
        finally:
            stop.set()
            await serving

    def write(self, launch: LaunchDescription) -> str:
        """Put a launch description where agents look for it; returns its key."""
        key = _key(launch)
        open_store(self.bucket_url).put(key, launch.model_dump_json().encode())
        return key

    async def start(
        self, activity: Activity, machine: str, body: Any, attempts: int = 20, heartbeat_timeout_s: float = 2.0
    ) -> "Pending":
        """Call an activity; its result is waited for with `result`."""
        handle = await self.client.start_workflow(
            CallWorkflow.run,
            Call(activity.value, machine, asdict(body), heartbeat_timeout_s, attempts),
            id=f"call-{uuid.uuid4().hex}",
            task_queue=self.queue,
        )
        return Pending(handle)

    async def prepare(self, launch: LaunchDescription, machine: str, leads: Sequence[str] = ()) -> NodePrepared:
        """`node.prepare` of an attempt that `write` has put into the bucket."""
        request = PrepareNode(launch.workload_id, launch.attempt, machine, _key(launch), self.bucket_url, list(leads))
        prepared: NodePrepared = await (await self.start(Activity.PREPARE_NODE, machine, request)).result(NodePrepared)
        return prepared

    async def run(
        self,
        launch: LaunchDescription,
        machine: str,
        masters: dict[str, str] | None = None,
        sha256: str | None = None,
        attempts: int = 20,
    ) -> "Pending":
        """`node.run`, started."""
        key = _key(launch)
        request = RunNode(launch.workload_id, launch.attempt, machine, key, self.bucket_url, masters or {}, sha256)
        return await self.start(Activity.RUN_NODE, machine, request, attempts)

    async def stop(self, launch: LaunchDescription, machine: str, grace_s: float) -> NodeOutcome:
        """`node.stop`, to its end."""
        request = StopNode(launch.workload_id, launch.attempt, grace_s)
        stopped: NodeOutcome = await (await self.start(Activity.STOP_NODE, machine, request)).result(NodeOutcome)
        return stopped

    def folder_of(self, launch: LaunchDescription, config: AgentConfig, job: str = "main", task: int = 0) -> RunFolder:
        """A task's folder on a machine."""
        path = config.state_dir / "runs" / f"{launch.workload_id}.{launch.attempt}" / f"{job}.{task}"
        return RunFolder(path, launch.workload_id, launch.attempt, job, task)

    def log(self, launch: LaunchDescription, job: str = "main", task: int = 0) -> tuple[bytes, bool]:
        """What is in the bucket of a task's output, checked for gaps and overlaps, and whether it is complete."""
        return read_log(self.bucket_url, log_prefix(launch.workload_id, launch.attempt, job, task))


def read_log(bucket_url: str, prefix: str) -> tuple[bytes, bool]:
    """The stream under a log prefix, as a reader puts it together, and whether its end is there."""
    store = open_store(bucket_url)
    text = b""
    complete = False
    for info in store.list(prefix):
        name = info.key.removeprefix(prefix)
        if name == "end":
            complete = True
        else:
            assert int(name.removesuffix(".log")) == len(text), "a gap or an overlap"
            assert info.size_bytes > 0
            text += store.get(info.key)
    return text, complete


@dataclass
class Pending:
    """An activity that was called."""

    handle: WorkflowHandle[Any, Any]

    async def result(self, kind: type[Any]) -> Any:
        """What it returned, as `kind`."""
        return TypeAdapter(kind).validate_python(await self.handle.result())

    async def failure(self) -> Any:
        """The `ApplicationError` with which it failed."""
        try:
            await self.handle.result()
        except Exception as error:
            found: BaseException = error
            while found.__cause__ is not None:
                found = found.__cause__
            return found
        raise AssertionError("it did not fail")

    async def state(self) -> Any:
        """Its pending activity as Temporal describes it; None: it is not running."""
        described = await self.handle.describe()
        pending = described.raw_description.pending_activities
        return pending[0] if pending else None

    async def heartbeat(self) -> Any:
        """Its last heartbeat's first detail, decoded; None: there was none."""
        pending = await self.state()
        if pending is None or not pending.HasField("heartbeat_details"):
            return None
        payloads = pending.heartbeat_details.payloads
        return json.loads(payloads[0].data) if payloads else None


def description(
    lab_region: str,
    config: AgentConfig,
    *commands: str,
    workload_id: str | None = None,
    attempt: int = 1,
    grace_s: float = 5.0,
    **changes: Any,
) -> LaunchDescription:
    """An attempt with one job `main` whose task n runs the n-th of `commands`, as a script, on one machine."""
    script = "case $RANK in\n" + "".join(f"{n}) {command} ;;\n" for n, command in enumerate(commands)) + "esac\n"
    count = len(commands)
    body: dict[str, Any] = {
        "workload_id": workload_id or f"wl-{uuid.uuid4().hex[:12]}",
        "name": "trial",
        "tenant": "vision",
        "attempt": attempt,
        "region": lab_region,
        "checkpoint": {"interval_s": 600, "grace_s": grace_s, "keep": 2, "uri": "file:///nowhere/checkpoints/"},
        "logs": {"interval_s": 0.3},
        "jobs": {
            "main": {"role": "worker", "tasks": count, "script": script, "master_machine": config.machine},
        },
        "tasks": [
            {
                "job": "main",
                "task": n,
                "machine": config.machine,
                "rank": n,
                "world_size": count,
                "node_rank": 0,
                "local_rank": n,
                "local_world_size": count,
                "slots": [n],
            }
            for n in range(count)
        ],
    }
    return LaunchDescription.model_validate(body | changes)
