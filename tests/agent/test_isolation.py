"""Isolation of tasks: resource limits from their requests, and a separate user for each tenant.

The tests check what the tasks themselves were able to do.
"""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent import tasks
from agent.cgroups import (
    CONTROLLERS,
    TaskLimits,
    engine_parent,
    limit,
    make_cgroup,
    remove_cgroup,
)
from agent.config import AgentConfig
from agent.containers.memory_kills import ContainerMemory
from agent.intervals import write_interval
from agent.isolation import TENANT_UIDS, why_not
from agent.state import StateFolder
from domain.ids import checkpoint_marker_key
from domain.isolation import Isolation
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from mizzen.cadence.interval_file import SiteInterval
from mizzen.objects import open_store
from tests.agent.harness import Lab, description, ended, python, run_folder, run_of, until_async

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can limit tasks and start them as other users")
PROCESSES = 141
"""Process limit of a task that requests a tenth of a CPU."""


def limited(lab: Lab, config: AgentConfig, command: str, **changes: Any) -> LaunchDescription:
    """Returns a task that requests 64 MiB and a tenth of a CPU, with an interpreter that every user may run."""
    launch = description(lab.region, config, command, **changes)
    asked = [place.model_copy(update={"memory_bytes": 64 << 20, "cpus_milli": 100}) for place in launch.tasks]
    return launch.model_copy(update={"tasks": tuple(asked)})


async def test_a_task_that_takes_more_memory_than_it_asked_for_is_killed(lab: Lab) -> None:
    """The kernel kills the task; its exit reports the memory limit and the peak; other tasks are not affected."""
    config = lab.config()
    greedy = f"exec {sys.executable} -I -S -c \"print('on', flush=True); x = b'x' * (500 << 20); print('off')\""
    launch, modest = limited(lab, config, greedy), limited(lab, config, f"exec {sys.executable} -I -S -c pass")
    for each in (launch, modest):
        lab.write(each)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        (end,) = outcome.exits
        assert (end.signal, end.memory_limit_bytes) == (9, 64 << 20)
        assert end.memory_peak_bytes is not None and end.memory_peak_bytes > 50 << 20
        assert lab.folder_of(launch, config).output.read_text() == "on\n"
        outcome = await (await lab.run(modest, config.machine)).result(NodeOutcome)
        assert (outcome.exits[0].exit_code, outcome.exits[0].memory_limit_bytes) == (0, None)
    # Cgroups of other tests appear and disappear during this walk; os.walk, unlike rglob, ignores that.
    left = [name for _, folders, _ in os.walk("/sys/fs/cgroup") for name in folders if launch.workload_id in name]
    assert left == []


FORKS = """
import os, time
made = 0
for _ in range(300):
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError:
        break
    made += 1
print(made, flush=True)
"""


def test_processes_are_bounded(tmp_path: Path) -> None:
    """A task that forks 300 children gets no more processes than its limit, and none is left when it has ended."""
    run = run_folder(tmp_path)
    folders, missing = limit(run.run_id, TaskLimits(256 << 20, PROCESSES, 100))
    assert missing == [], f"the kernel did not set these limits; needed controllers: {CONTROLLERS}"
    tasks.start(run, python(run, FORKS, limits=tuple(folders)))
    assert ended(run).exit_code == 0
    assert int(run.output.read_text()) == PROCESSES - 1
    assert not any(Path(path).exists() for path in folders)


def test_a_limit_that_cannot_be_set_is_named(tmp_path: Path) -> None:
    """A limit that the kernel rejects is returned by name, and its cgroup can be removed."""
    folders, missing = limit("wl-test.1.main.0", TaskLimits(-7, 100, 100))
    assert missing == ["memory"]
    for path in folders:
        remove_cgroup(path)
        assert not Path(path).exists()


FULL = """
import os, signal
file = open("much", "wb")
for _ in range(160):
    file.write(bytes(1 << 20))
    file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize(
    ("then", "was_killed"), [("x = b'x' * (8 << 20)", False), (FULL, False), ("x = b'x' * (128 << 20)", True)]
)
def test_a_kill_at_a_memory_limit_that_an_engine_has_set_is_seen(
    tmp_path: Path, then: str, was_killed: bool, removed: bool
) -> None:
    """Below the task's cgroup an engine makes one with the limit. A memory full of the cache of files is no kill."""
    path, limit_bytes = make_cgroup(run_of(tmp_path).run_id), 64 << 20
    if path is None or (name := engine_parent(path)) is None:
        pytest.skip("this machine has no cgroup v2, or shows only a part of it")
    points = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if "cgroup" in line]
    root = next((one for one in points if (one / "memory.usage_in_bytes").exists()), None)
    if root is None:
        pytest.skip("this machine has no memory controller of cgroup v1")
    parent = root / name.strip("/")
    made = parent / "container"
    try:
        made.mkdir(parents=True)
        (made / "memory.limit_in_bytes").write_text(str(limit_bytes))
        memory = ContainerMemory(path)
        takes = f"open('{made}/cgroup.procs', 'w').write('0')\n{then}"
        ended = subprocess.run([sys.executable, "-I", "-S", "-c", takes], cwd=tmp_path, check=False)
        assert ended.returncode == (-9 if was_killed or then == FULL else 0)
        if then == FULL:
            assert int((parent / "memory.max_usage_in_bytes").read_text()) > 0.9 * limit_bytes
        if removed:
            remove_cgroup(str(made))
        assert memory.was_killed() is was_killed
    finally:
        for cgroup in (made, parent, path):
            remove_cgroup(str(cgroup))


def tenants(lab: Lab, isolation: Isolation = Isolation.SANDBOX) -> AgentConfig:
    return lab.config(tenant_uids=TENANT_UIDS, bucket_url=lab.bucket_url, isolation=isolation, paths=())


@pytest.mark.parametrize(
    ("place", "isolation"), [("bucket", Isolation.SANDBOX), ("store", Isolation.SANDBOX), ("store", Isolation.USER)]
)
async def test_a_second_tenants_task_reads_no_key_and_nothing_of_another_tenant(
    open_lab: Lab, place: str, isolation: Isolation
) -> None:
    """A task can read its own files, but no keys, launch files, or folders and checkpoints of other tenants.

    Checkpoints are in the region's bucket, or in the store of the cluster. A sandbox also works below a folder that
    only root may enter.
    """
    lab, config = open_lab, tenants(open_lab, isolation)
    if isolation is Isolation.USER:
        lab.folder.chmod(0o711)
    (lab.folder / "operator.key").write_text("mzn_secret")
    (lab.folder / "operator.key").chmod(0o600)
    state = StateFolder(config.state_dir)
    checkpoints = lab.folder / place / "checkpoints"

    def launch_of(tenant: int, command: str) -> LaunchDescription:
        launch = _saving_in(checkpoints, description(lab.region, config, command, tenant_number=tenant))
        if place == "store":
            open_store(checkpoints.parent.as_uri()).put(checkpoint_marker_key(launch.workload_id), b"x")
        return launch

    first = launch_of(1, "id -u; echo mine > mine; echo saved > ${MIZZEN_CHECKPOINT_URI#file://}/c")
    key = lab.write(first)
    (checkpoints / first.workload_id).mkdir(parents=True, exist_ok=True)
    (checkpoints / first.workload_id / "copied").write_text("by a worker")
    own = lab.folder_of(first, config).path
    closed = [
        lab.folder / "operator.key",
        state.path / "key",
        own.parent / "launch.json",
        own / "script.sh",
        own / "output.log",
        own / "work" / "mine",
        checkpoints / first.workload_id / "c",
        checkpoints / first.workload_id / "copied",
        lab.folder / "bucket" / key,
    ]
    tries = "; ".join(f"cat {path} 2>/dev/null && echo read {path}" for path in closed)
    second = launch_of(2, f"id -u; {tries}; ls {lab.folder} / /root 2>/dev/null | grep -c key || true")
    lab.write(second)
    third = launch_of(1, f"cat {checkpoints}/{first.workload_id}/c {checkpoints}/{first.workload_id}/copied")
    third = third.model_copy(update={"workload_id": first.workload_id, "attempt": 2, "checkpoint": first.checkpoint})
    lab.write(third)
    async with lab.agent(config):
        for launch in (first, second, third):
            outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
            output = lab.folder_of(launch, config).output.read_text()
            assert [e.exit_code for e in outcome.exits] == [0], output
            await until_async(lambda launch=launch: lab.log(launch)[1])
    assert all(path.exists() for path in closed)
    assert lab.log(first)[0] == f"{TENANT_UIDS[0] + 1}\n".encode()
    assert lab.log(second)[0] == f"{TENANT_UIDS[0] + 2}\n0\n".encode()
    assert lab.log(third)[0] == b"saved\nby a worker"


@pytest.mark.parametrize("place", ["bucket", "store"])
async def test_folders_of_others_keep_their_modes(open_lab: Lab, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """A shared folder as bucket, or as store of the cluster: its folders keep their modes, and mizzen's are closed."""
    lab, config = open_lab, tenants(open_lab)
    root = lab.folder / place
    theirs = {root: 0o1777, root / "checkpoints": 0o1777, root / "logs": 0o755}
    for path, mode in theirs.items():
        path.mkdir(exist_ok=True)
        path.chmod(mode)
    command = "echo saved > ${MIZZEN_CHECKPOINT_URI#file://}/c"
    launch = _saving_in(root / "checkpoints", description(lab.region, config, command, tenant_number=3))
    if place == "store":
        open_store(root.as_uri()).put(checkpoint_marker_key(launch.workload_id), b"x")
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert [e.exit_code for e in outcome.exits] == [0]
    own = {root / "checkpoints" / launch.workload_id: 0o700, lab.folder / "bucket" / "launches": 0o700}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in (*theirs, *own)} == {**theirs, **own}
    assert (f"{root / 'logs'}: mode 755 lets tasks" in caplog.text) == (place == "bucket")


async def test_a_store_that_is_not_mounted_on_the_machine_starts_no_task(open_lab: Lab) -> None:
    """The tasks would start from step 0 and save on the machine's own disk. The folder is not created."""
    lab, config = open_lab, tenants(open_lab)
    store = lab.folder / "store"
    launch = description(lab.region, config, "touch ran", tenant_number=3)
    launch = _saving_in(store / "checkpoints", launch)
    lab.write(launch)
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
        assert failure.type == "BucketUnavailable"
        assert str(store) in str(failure) and f"checkpoints/{launch.workload_id}/marker is missing" in str(failure)
        assert not store.exists()
        open_store(store.as_uri()).put(checkpoint_marker_key(launch.workload_id), b"x")
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert [e.exit_code for e in outcome.exits] == [0]


def _saving_in(checkpoints: Path, launch: LaunchDescription) -> LaunchDescription:
    uri = f"{checkpoints.as_uri()}/{launch.workload_id}/"
    return launch.model_copy(update={"checkpoint": launch.checkpoint.model_copy(update={"uri": uri})})


async def test_a_tasks_python_and_sdk_work_although_only_root_may_enter_their_folder(open_lab: Lab) -> None:
    """Python from a checkout that belongs to root runs as the tenant's user, which sees nothing else in that folder."""
    lab, config = open_lab, tenants(open_lab)
    assert why_not(Isolation.SANDBOX, config.state_dir, TENANT_UIDS[0]) is None
    code = "import json, os, mizzen; seen = os.listdir('/root') if os.path.isdir('/root') else []"
    code += "; print(json.dumps([os.getuid(), sorted(seen)]))"
    launch = description(lab.region, config, f'exec "$MIZZEN_PYTHON" -c "{code}"', tenant_number=7)
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    output = lab.folder_of(launch, config).output.read_text()
    assert [e.exit_code for e in outcome.exits] == [0], output
    uid, seen = json.loads(output)
    assert uid == TENANT_UIDS[0] + 7
    needed = Path(sys.base_prefix).resolve()
    assert set(seen) <= ({needed.parts[2]} if needed.parts[1] == "root" else set(seen))


async def test_a_tenants_task_reads_its_interval_while_it_runs(open_lab: Lab) -> None:
    """The agent's file appears and is replaced below a folder that only root may enter; the task cannot change it."""
    lab, config = open_lab, tenants(open_lab)
    script = """
        until grep -q 60 "$MIZZEN_INTERVAL_FILE" 2>/dev/null; do sleep 0.05; done; touch seen
        until grep -q 90 "$MIZZEN_INTERVAL_FILE"; do sleep 0.05; done
        echo 1 2>/dev/null > "$MIZZEN_INTERVAL_FILE" || rm -f "$MIZZEN_INTERVAL_FILE" 2>/dev/null || echo kept
    """
    launch = description(lab.region, config, script, tenant_number=5)
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(run.path.exists)
        write_interval(run, SiteInterval(60.0, 4e9))
        await until_async((run.work / "seen").exists)
        write_interval(run, SiteInterval(90.0, 4e9))
        outcome: NodeOutcome = await running.result(NodeOutcome)
    assert [e.exit_code for e in outcome.exits] == [0]
    assert run.output.read_text() == "kept\n"


def test_what_an_agent_keeps_is_closed(tmp_path: Path) -> None:
    """Other users cannot list what an agent makes. A state folder that exists keeps its mode; its files are private."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o1777)
    state = StateFolder(tmp_path / "state")
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o1777
    attempt = state.attempt("wl-1", 1)
    attempt.save_launch(b"{}", "file:///b")
    attempt.save_ports({"main": 1})
    for path in (state.path / "runs", attempt.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o711
    for name in ("launch.json", "bucket.json", "ports.json"):
        assert stat.S_IMODE((attempt.path / name).stat().st_mode) == 0o600
