"""Helpers of the agent's tests: launch descriptions, run folders, and a workflow that calls activities."""

import asyncio
import base64
import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from nacl.public import PublicKey, SealedBox
from pydantic import TypeAdapter
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from agent import sealed, shim, tasks
from agent.config import AgentConfig
from agent.host import serve
from agent.isolation import TENANT_UIDS, why_not
from agent.launch import TaskLaunch
from agent.state import StateFolder
from agent.tasks import RunFolder
from domain.ids import CONTROL_QUEUE, launch_key, log_prefix
from domain.isolation import Isolation
from domain.launch import LaunchDescription
from domain.log_segments import segment_of
from domain.protocol.activities import Activity
from domain.protocol.leases import LeasedElement, RunElements
from domain.protocol.machines import NodeOutcome, NodePrepared, PrepareNode, RunNode, StopNode
from domain.spec import ArraySpec, MountSpec, RunnersSpec
from infra.config.services import TemporalSettings
from infra.stack.temporal import DYNAMIC_CONFIG
from infra.temporal_client import connect
from mizzen.objects import open_store
from tests.activities.temporal import end_all
from tests.agent.calls import Call, CallWorkflow, HelloWorkflow


def _modes() -> dict[Isolation, str | None]:
    uid = TENANT_UIDS[0] if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        return {mode: why_not(mode, Path(folder), uid) for mode in Isolation}


WHY_NOT = _modes()
"""Why this machine does not have a mode of isolation; None: it has it."""
MODE = Isolation(
    os.environ.get("MIZZEN_TEST_ISOLATION", max((m for m in Isolation if WHY_NOT[m] is None), key=lambda m: m.rank))
)
"""Mode of isolation of the machines in tests that do not name one: the strongest, or that of `make test-isolation`."""
needs_sandbox = pytest.mark.skipif(WHY_NOT[Isolation.SANDBOX] is not None, reason=str(WHY_NOT[Isolation.SANDBOX]))


def has_scopes() -> bool:
    """Returns whether the kernel has the scopes of Landlock (its version 6)."""
    return bool(ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6)


def own_address() -> str | None:
    """Returns an address of this machine that is not loopback; None: it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None


def processes_of(folder: Path) -> list[int]:
    """Returns the pids of running processes, except this one, whose command line or environment contains the folder."""
    mark = os.fsencode(folder)
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                    found.append(int(path.name))
    return sorted(found)


def process_name(pid: int) -> str:
    """Returns the name of a process (at most 15 bytes), or an empty string if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def zygotes(of: int | None = None) -> set[int]:
    """Returns the pids of the zygotes that a process, by default this one, has started and that still run."""
    parent, table = os.getpid() if of is None else of, shim.process_table()
    children = [pid for pid, (state, above, _) in table.items() if above == parent and state not in "ZX"]
    return {pid for pid in children if process_name(pid) == "mizzen-zygote"}


def until(holds: Callable[[], Any], patience_s: float = 20.0) -> Any:
    """Waits until `holds` returns a truthy value, and returns that value."""
    give_up_s = time.monotonic() + patience_s
    while not (answer := holds()):
        assert time.monotonic() < give_up_s, "the condition did not become true in time"
        time.sleep(0.02)
    return answer


async def until_async(holds: Callable[[], Any], patience_s: float = 20.0) -> Any:
    """Waits like `until`, without blocking the event loop."""
    return await asyncio.to_thread(until, holds, patience_s)


@contextlib.contextmanager
def dev_server(port: int) -> Iterator[None]:
    """Runs a Temporal dev server that stores its data in memory."""
    binary = shutil.which("temporal") or str(Path(sys.executable).parent / "temporal")
    process = subprocess.Popen(
        [binary, "server", "start-dev", "--headless", "--port", str(port), "--log-level", "error", *DYNAMIC_CONFIG],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def serves() -> bool:
        assert process.poll() is None, "the dev server has exited"
        # An open port is not enough: the server listens before it serves, and fails calls with "not healthy yet".
        asked = [binary, "operator", "cluster", "health", "--address", f"127.0.0.1:{port}"]
        return subprocess.run(asked, capture_output=True, timeout=30, check=False).returncode == 0

    try:
        until(serves, 60.0)
        yield
    finally:
        process.kill()
        process.wait()


def run_of(root: Path, job: str = "main", task: int = 0) -> RunFolder:
    """Returns the run folder, in `root`, of a task whose workload id is derived from `root` and therefore unique.

    Tests run in parallel, and settling a lost task kills every process with its run id on this machine.
    """
    return RunFolder(root / f"{job}.{task}", f"wl-{sha256(os.fsencode(root)).hexdigest()[:12]}", 1, job, task)


def run_folder(root: Path, job: str = "main", task: int = 0) -> RunFolder:
    """Creates an empty run folder for a task and returns it."""
    run = run_of(root, job, task)
    run.work.mkdir(parents=True)
    run.report.parent.mkdir()
    return run


def task_launch(run: RunFolder, *argv: str, grace_s: float = 5.0, **more: Any) -> TaskLaunch:
    """Returns the launch description of a task that runs `argv` in its run folder."""
    env = {"PATH": os.environ["PATH"], "HOME": str(run.work), "MIZZEN_RUN_ID": run.run_id}
    return TaskLaunch(argv=argv, env=env, cwd=str(run.work), output=str(run.output), grace_s=grace_s, **more)


def python(run: RunFolder, code: str, **more: Any) -> TaskLaunch:
    """Returns the launch description of a task that runs a Python program."""
    return task_launch(run, sys.executable, "-I", "-S", "-c", code, **more)


def ended(run: RunFolder) -> tasks.ReportedExit:
    """Waits for the end of the task and returns its exit."""
    exit_ = until(lambda: run.exit())
    assert isinstance(exit_, tasks.ReportedExit)
    return exit_


PYTHON = f"{sys.executable} -I -S -u"
"""Command that starts Python without `site` and user settings, which is fast."""

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
"""Program that ignores SIGTERM and starts children and grandchildren, in other sessions, that also ignore it."""


# ----------------------------------------------------------------------------------------------------- with Temporal


def _key(launch: LaunchDescription) -> str:
    """Returns the same key for every launch description of an attempt, because tests replace the description."""
    return launch_key(launch.workload_id, launch.attempt, "0" * 64)


@dataclass
class Lab:
    """The bucket, Temporal client and worker of one test."""

    folder: Path
    temporal: TemporalSettings
    client: Client
    queue: str
    region: str = field(default_factory=lambda: f"r{uuid.uuid4().hex[:8]}")

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: Path, address: str, payload_keys: Path | None = None) -> AsyncIterator["Lab"]:
        """Opens a lab whose workflows run in this process."""
        settings = TemporalSettings(address=address, payload_keys=payload_keys)
        client = await connect(settings)
        lab = cls(folder, settings, client, f"test-{uuid.uuid4().hex}")
        runner = UnsandboxedWorkflowRunner()
        async with (
            Worker(client, task_queue=lab.queue, workflows=[CallWorkflow], workflow_runner=runner),
            Worker(client, task_queue=CONTROL_QUEUE, workflows=[HelloWorkflow], workflow_runner=runner),
        ):
            yield lab
        await end_all(client)  # Other tests use the same server.

    @property
    def bucket_url(self) -> str:
        """URL of the region's bucket."""
        return f"file://{self.folder}/bucket"

    def config(self, name: str = "m1", **changes: Any) -> AgentConfig:
        """Returns the configuration of a machine of the region, with a port range that other programs rarely use.

        Its tasks can write marks into the lab's folder, unless `paths` is empty. Skips where the machine lacks
        the mode.
        """
        mode = changes.get("isolation", MODE)
        if (why := WHY_NOT[mode]) is not None:
            pytest.skip(f"isolation {mode}: {why}")
        if changes.get("paths") != ():
            self._let_in(mode)
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
            "isolation": mode,
            "paths": (f"{self.folder}:rw",) if mode is Isolation.SANDBOX else (),
            "tenant_uids": TENANT_UIDS if os.geteuid() == 0 and mode is not Isolation.NONE else None,
        }
        if "run_as" in changes:
            base["tenant_uids"] = None
        return AgentConfig.model_validate(base | changes)

    def _let_in(self, mode: Isolation) -> None:
        """Lets tasks of other users write into the folder. Without a sandbox, they must enter those above it, too."""
        if mode is not Isolation.NONE:
            self.folder.chmod(0o777)
        for above in self.folder.parents if mode is Isolation.USER else ():
            if above.is_relative_to(tempfile.gettempdir()) and above.owner() == self.folder.owner():
                above.chmod(above.stat().st_mode | 0o011)

    @contextlib.asynccontextmanager
    async def agent(self, config: AgentConfig) -> AsyncIterator[None]:
        """Runs an agent in this process; at the end the agent detaches from its tasks."""
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(config, lambda: connect(self.temporal), stop))
        try:
            yield
        finally:
            stop.set()
            await serving

    def write(self, launch: LaunchDescription) -> str:
        """Writes a launch description to the place where agents read it, and returns its key."""
        key = _key(launch)
        open_store(self.bucket_url).put(key, launch.model_dump_json().encode())
        return key

    async def start(
        self, activity: Activity, machine: str, body: Any, attempts: int = 20, heartbeat_timeout_s: float = 2.0
    ) -> "Pending":
        """Starts an activity; `Pending.result` waits for its result."""
        handle = await self.client.start_workflow(
            CallWorkflow.run,
            Call(activity.value, machine, asdict(body), heartbeat_timeout_s, attempts),
            id=f"call-{uuid.uuid4().hex}",
            task_queue=self.queue,
        )
        return Pending(handle)

    async def prepare(
        self,
        launch: LaunchDescription,
        machine: str,
        leads: Sequence[str] = (),
        *,
        only_images: bool = False,
        attempts: int = 20,
    ) -> NodePrepared:
        """Runs `node.prepare` for an attempt whose description `write` has put into the bucket."""
        key, sha256 = _key(launch), digest(launch)
        request = PrepareNode(
            launch.workload_id, launch.attempt, machine, key, self.bucket_url, list(leads), sha256, only_images
        )
        running = await self.start(Activity.PREPARE_NODE, machine, request, attempts)
        prepared: NodePrepared = await running.result(NodePrepared)
        return prepared

    async def run(
        self,
        launch: LaunchDescription,
        machine: str,
        masters: dict[str, str] | None = None,
        sha256: str | None = None,
        attempts: int = 20,
    ) -> "Pending":
        """Starts `node.run`."""
        key, sha256 = _key(launch), sha256 or digest(launch)
        request = RunNode(launch.workload_id, launch.attempt, machine, key, self.bucket_url, masters or {}, sha256)
        return await self.start(Activity.RUN_NODE, machine, request, attempts)

    async def stop(self, launch: LaunchDescription, machine: str, grace_s: float) -> NodeOutcome:
        """Runs `node.stop` and waits for its result."""
        request = StopNode(launch.workload_id, launch.attempt, grace_s)
        stopped: NodeOutcome = await (await self.start(Activity.STOP_NODE, machine, request)).result(NodeOutcome)
        return stopped

    def folder_of(self, launch: LaunchDescription, config: AgentConfig, job: str = "main", task: int = 0) -> RunFolder:
        """Returns the run folder of a task on a machine."""
        path = config.state_dir / "runs" / f"{launch.workload_id}.{launch.attempt}" / f"{job}.{task}"
        return RunFolder(path, launch.workload_id, launch.attempt, job, task)

    def log(self, launch: LaunchDescription, job: str = "main", task: int = 0) -> tuple[bytes, bool]:
        """Returns a task's output in the bucket, checked for gaps and overlaps, and whether the output is complete."""
        return read_log(self.bucket_url, log_prefix(launch.workload_id, launch.attempt, job, task))


def read_log(bucket_url: str, prefix: str) -> tuple[bytes, bool]:
    """Returns the log stream under a prefix, joined as a reader joins it, and whether its end marker exists."""
    store = open_store(bucket_url)
    text = b""
    complete = False
    for info in store.list(prefix):
        name = info.key.removeprefix(prefix)
        if name == "end":
            complete = True
        else:
            segment = segment_of(name)
            assert segment is not None and segment.offset == len(text), "the segments have a gap or an overlap"
            assert info.size_bytes > 0
            text += store.get(info.key)
    return text, complete


@dataclass
class Pending:
    """An activity that was started."""

    handle: WorkflowHandle[Any, Any]

    async def result(self, kind: type[Any]) -> Any:
        """Returns the result of the activity as `kind`."""
        return TypeAdapter(kind).validate_python(await self.handle.result())

    async def failure(self) -> Any:
        """Returns the `ApplicationError` with which the activity failed."""
        try:
            await self.handle.result()
        except Exception as error:
            found: BaseException = error
            while found.__cause__ is not None:
                found = found.__cause__
            return found
        raise AssertionError("the activity did not fail")

    async def state(self) -> Any:
        """Returns Temporal's description of the pending activity; None if it is not running."""
        described = await self.handle.describe()
        pending = described.raw_description.pending_activities
        return pending[0] if pending else None

    async def heartbeat(self) -> Any:
        """Returns the first detail of the last heartbeat, decoded; None if there was no heartbeat."""
        pending = await self.state()
        if pending is None or not pending.HasField("heartbeat_details"):
            return None
        payloads = pending.heartbeat_details.payloads
        return json.loads(payloads[0].data) if payloads else None


def digest(launch: LaunchDescription) -> str:
    """Returns the SHA-256 of a launch description, in hex."""
    return hashlib.sha256(launch.model_dump_json().encode()).hexdigest()


def uid_of(config: AgentConfig) -> int:
    """Returns the user that tasks of the tenant 0 run as."""
    owner = config.owner_of(0)
    return os.geteuid() if owner is None else owner.uid


def sealed_for(config: AgentConfig, secrets: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the variables of each job that are secret, in a sealed box for an agent's machine."""
    key = PublicKey(base64.b64decode(sealed.public_key(StateFolder(config.state_dir).private_key())))
    return base64.b64encode(SealedBox(key).encrypt(json.dumps(secrets).encode())).decode()


def with_mounts(launch: LaunchDescription, *paths: str) -> LaunchDescription:
    """Returns the description with files at further paths, which the archive has."""
    mounts = tuple(MountSpec(target=path) for path in paths)
    jobs = {name: job.model_copy(update={"mounts": mounts}) for name, job in launch.jobs.items()}
    return launch.model_copy(update={"jobs": jobs})


def description(
    lab_region: str,
    config: AgentConfig,
    *commands: str,
    workload_id: str | None = None,
    attempt: int = 1,
    grace_s: float = 5.0,
    **changes: Any,
) -> LaunchDescription:
    """Returns an attempt with one job `main` on one machine; task n runs the n-th of `commands` as a script."""
    script = "case $RANK in\n" + "".join(f"{n}) {command} ;;\n" for n, command in enumerate(commands)) + "esac\n"
    count = len(commands)
    body: dict[str, Any] = {
        "workload_id": workload_id or f"wl-{uuid.uuid4().hex[:12]}",
        "name": "trial",
        "tenant": "vision",
        "tenant_number": 0,
        "attempt": attempt,
        "region": lab_region,
        "checkpoint": {
            "interval_s": 600,
            "grace_s": grace_s,
            "keep": 2,
            "uri": f"file://{config.state_dir}-checkpoints/",
        },
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


def runner(lab: Lab, config: AgentConfig, command: str, **runners: Any) -> LaunchDescription:
    """Writes the launch of a runner of ten elements to the bucket, and returns it. FOLDER is the lab's folder."""
    elements = ArraySpec(ranges=((0, 9, 1),), runners=RunnersSpec(**runners))
    launch = description(
        lab.region, config, command.replace("FOLDER", str(lab.folder)), workload_id=f"wl-{uuid.uuid4().hex[:12]}-r0",
        elements=elements,
    )  # fmt: skip
    lab.write(launch)
    return launch


async def run_elements(lab: Lab, launch: LaunchDescription, config: AgentConfig, *indexes: int) -> Pending:
    """Starts the first attempts of elements in a runner that runs."""
    leased = [LeasedElement(index, 1) for index in indexes]
    request = RunElements(launch.workload_id, launch.attempt, config.machine, leased)
    return await lab.start(Activity.RUN_ELEMENTS, config.machine, request)
