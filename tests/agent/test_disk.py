"""Limits on the disk space of tasks, on a small file system of its own."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent import tasks
from agent.config import AgentConfig
from agent.disk import DiskPool, DiskUse, measure
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.isolation import Isolation
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from tests.agent.conftest import DISK_BYTES, DISK_FILES
from tests.agent.harness import MODE, PYTHON, Lab, description, until_async

_OWN_TMP = pytest.mark.skipif(
    MODE is not Isolation.SANDBOX, reason="without a sandbox, /tmp is the machine's, which has no limit"
)
_FILL = """
import os, time
out = open({path!r}, "wb", buffering=0)
{then}
while True:
    out.write(b"x" * (1 << 20))
    time.sleep(0.02)
"""


def _python(code: str) -> str:
    return f"cat > program.py <<'END'\n{code}\nEND\nexec {PYTHON} program.py"


async def _outcome(lab: Lab, config: AgentConfig, launch: LaunchDescription) -> NodeOutcome:
    lab.write(launch)
    found: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    return found


@pytest.mark.parametrize(
    ("path", "then"),
    [
        pytest.param("big", "", id="working directory"),
        pytest.param("/tmp/big", "", id="tmp", marks=_OWN_TMP),
        pytest.param("big", "os.unlink('big')", id="deleted file"),
    ],
)
async def test_a_task_that_fills_the_disk_is_stopped(lab: Lab, disk: Path, path: str, then: str) -> None:
    """It is killed before the disk is full, with a report, and the space is free again. Other tasks continue."""
    config = lab.config(state_dir=disk / "state")
    other = description(lab.region, config, f"while [ ! -e {lab.folder}/go ]; do sleep 0.05; done; echo x > file")
    lab.write(other)
    async with lab.agent(config):
        pending = await lab.run(other, config.machine)
        await until_async(lambda: tasks.inspect(lab.folder_of(other, config)) is TaskState.RUNNING)
        launch = description(lab.region, config, _python(_FILL.format(path=path, then=then)))
        outcome = await _outcome(lab, config, launch)
        (end,) = outcome.exits
        assert end.disk is not None and not end.succeeded and not outcome.stopped
        assert end.disk.limit_bytes < end.disk.used_bytes < DISK_BYTES, "stopped before the disk was full"
        assert end.disk.limit_bytes > DISK_BYTES // 2
        await until_async(lambda: os.statvfs(disk).f_bavail * 4096 > DISK_BYTES * 3 // 4)
        (lab.folder / "go").touch()
        assert [e.exit_code for e in (await pending.result(NodeOutcome)).exits] == [0]


async def test_a_task_that_fills_the_disk_at_once(lab: Lab, disk: Path) -> None:
    """A task that fails by itself, because it has filled the disk faster than the agent looked, has the report, too."""
    config = lab.config(state_dir=disk / "state")
    launch = description(lab.region, config, f'{PYTHON} -c \'open("big", "wb").write(bytes({2 * DISK_BYTES}))\'')
    async with lab.agent(config):
        (end,) = (await _outcome(lab, config, launch)).exits
        # It fails by itself, unless the agent was faster.
        assert not end.succeeded and end.disk is not None and end.disk.used_bytes > end.disk.limit_bytes
        assert not lab.folder_of(launch, config).work.exists()


@pytest.mark.rotating
async def test_a_task_that_makes_too_many_files_is_stopped(lab: Lab, disk: Path) -> None:
    """Files are limited as space is: without inodes nobody can make files on an empty disk."""
    config = lab.config(state_dir=disk / "state")
    code = "import os, time\nfor n in range(10**6):\n    os.close(os.open(str(n), os.O_CREAT)); time.sleep(0.001)"
    async with lab.agent(config):
        (end,) = (await _outcome(lab, config, description(lab.region, config, _python(code)))).exits
        assert end.disk is not None and end.disk.limit_files < end.disk.used_files < DISK_FILES


async def test_a_task_within_its_limit_ends_as_it_does(lab: Lab, disk: Path) -> None:
    """A failure with another cause stays what it is, and the files stay."""
    config = lab.config(state_dir=disk / "state")
    launch = description(lab.region, config, "head -c 20000000 /dev/zero > big; exit 3")
    async with lab.agent(config):
        (end,) = (await _outcome(lab, config, launch)).exits
        assert (end.exit_code, end.disk) == (3, None)
        assert (lab.folder_of(launch, config).work / "big").stat().st_size == 20_000_000


async def test_the_limit_survives_the_agent(lab: Lab, disk: Path) -> None:
    """The next agent goes on with the limit of the attempt, and stops the task."""
    config = lab.config(state_dir=disk / "state")
    wait = f"while not os.path.exists('{lab.folder}/go'): time.sleep(0.05)"
    launch = description(lab.region, config, _python(_FILL.format(path="big", then=wait)))
    lab.write(launch)
    kept = config.state_dir / "runs" / f"{launch.workload_id}.1" / "disk.json"
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async(kept.exists)
        limit = kept.read_text()
    async with lab.agent(config):
        await asyncio.sleep(0.3)
        assert kept.read_text().partition("used")[0] == limit.partition("used")[0]
        (lab.folder / "go").touch()
        (end,) = (await pending.result(NodeOutcome)).exits
        assert end.disk is not None and f'"size_bytes": {end.disk.limit_bytes}' in limit


def test_attempts_share_the_disk(lab: Lab) -> None:
    """An attempt with half of the machine's memory may have half of the space, and less if others have less."""
    sizes = {}
    for name, fraction, memory_bytes in (("half", 0.8, 1 << 29), ("quarter", 0.8, 1 << 28), ("none", None, 1 << 29)):
        config = lab.config(disk_fraction=fraction)
        launch = description(lab.region, config, "true")
        places = [place.model_copy(update={"memory_bytes": memory_bytes}) for place in launch.tasks]
        state = StateFolder(config.state_dir)
        attempt = state.attempt(launch.workload_id, 1)
        attempt.path.mkdir()
        pool = DiskPool(config, state)
        limit = pool.limit_of(attempt, places)
        sizes[name] = None if limit is None else limit.size_bytes
        assert limit == pool.limit_of(attempt, []), "an attempt keeps its limit"
    free_bytes = shutil.disk_usage(lab.folder).free
    assert sizes["none"] is None
    assert sizes["half"] == pytest.approx(0.4 * free_bytes, rel=0.1)
    assert sizes["quarter"] == pytest.approx(0.2 * free_bytes, rel=0.1)


def test_what_counts(tmp_path: Path) -> None:
    """Blocks count and not sizes, a file with two names counts once, and links are not followed."""
    (tmp_path / "own").mkdir()
    (tmp_path / "outside").write_bytes(bytes(1 << 20))
    empty, _ = measure([tmp_path / "own"])
    with (tmp_path / "own" / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "own" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "own" / "file").write_bytes(bytes(100_000))
    (tmp_path / "own" / "again").hardlink_to(tmp_path / "own" / "file")
    used, is_all = measure([tmp_path / "own"])
    assert is_all and 100_000 <= used.size_bytes - empty.size_bytes < 130_000
    assert used.files == 3 and used.exceeds(DiskUse(1 << 30, 2)) and not used.exceeds(DiskUse(1 << 30, 3))
    assert measure([tmp_path / "missing"]) == (DiskUse(), True)


def test_folders_that_are_nested_too_deep(tmp_path: Path) -> None:
    """They cannot be measured to the end, which is told, and they can be removed."""
    state = StateFolder(tmp_path / "state")
    attempt = state.attempt("wl-1", 1)
    attempt.run("main", 0).work.mkdir(parents=True)
    nest = "import os\nfor _ in range(3000):\n    os.mkdir('nested'); os.chdir('nested')"
    subprocess.run(["python3", "-c", nest], cwd=attempt.run("main", 0).work, check=True)
    used, is_all = measure([attempt.path])
    assert not is_all and used.files > 100
    state.remove(attempt)
    assert not attempt.path.exists()
