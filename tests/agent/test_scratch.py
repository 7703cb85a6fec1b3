"""Private `/tmp`, `/var/tmp` and `/dev/shm`: shared by the tasks of an attempt, removed at its end."""

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path
from signal import SIGKILL

import pytest

import agent
from agent import scratch
from agent.host import tidy
from agent.state import StateFolder
from agent.tasks import RunFolder
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, description, until_async
from tests.agent.test_lending import OWNER, _lent, _mizzen

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
PLACES = ("/tmp", "/var/tmp", "/dev/shm")


def _writes(name: str) -> str:
    return "; ".join(f"test ! -e {place}/{name} && echo $RANK > {place}/{name}" for place in PLACES)


def _private(run: RunFolder) -> Path:
    return run.path.parent / "private"


def _mounted(path: Path) -> bool:
    return str(path) in Path("/proc/self/mounts").read_text()


async def test_the_tasks_of_an_attempt_share_private_folders(lab: Lab) -> None:
    """Tasks meet in the folders, also after a restart of the agent; nobody else sees the files, and none stays."""
    config, name = lab.config(private_tmp=True), f"x{uuid.uuid4().hex}"
    reads = " && ".join(f"test -s {place}/{name}" for place in PLACES)
    launch = description(
        lab.region, config,
        f"{_writes(name)}; touch written; while [ ! -e go ]; do sleep 0.05; done; echo done > {lab.folder}/bucket/seen",
        f"until {reads}; do sleep 0.05; done; touch read; while [ ! -e go ]; do sleep 0.05; done",
        checkpoint={"grace_s": 5, "keep": 2, "uri": f"{lab.bucket_url}"},
    )  # fmt: skip
    other = description(lab.region, config, _writes(name))
    for each in (launch, other):
        lab.write(each)
    runs = [lab.folder_of(launch, config, task=task) for task in (0, 1)]
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (runs[1].work / "read").exists())
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(other, config.machine)).result(NodeOutcome)
        assert outcome.exits[0].succeeded
        assert not any(Path(f"{place}/{name}").exists() for place in PLACES)
        assert _mounted(_private(runs[0]))
        (runs[1].work / "go").touch()
        await until_async(lambda: runs[1].exit())
        assert (_private(runs[0]) / "tmp" / name).exists()  # The other task still runs.
        (runs[0].work / "go").touch()
        outcome = await running.result(NodeOutcome)
        assert all(exit_.succeeded for exit_ in outcome.exits)
        await until_async(lambda: not _private(runs[0]).exists())
    assert not _mounted(_private(runs[0]))
    assert (lab.folder / "bucket" / "seen").read_text() == "done\n"  # The bucket is below /tmp, and is needed.


async def test_a_killed_shim_leaves_nothing(lab: Lab) -> None:
    """The agent removes the folders of an attempt whose shim was killed."""
    config = lab.config(private_tmp=True)
    launch = description(lab.region, config, f"{_writes('x')}; touch written; sleep 600")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "written").exists())
        identities = run.identities()
        assert identities is not None and identities[0].send(SIGKILL)
        await running.result(NodeOutcome)
    assert not _private(run).exists() and not _mounted(_private(run))


async def test_an_agent_that_starts_later_removes_them(lab: Lab) -> None:
    """If agent and shim have died, the next agent removes the folders, also if the control plane asks for nothing."""
    config = lab.config(private_tmp=True)
    launch = description(lab.region, config, f"{_writes('x')}; touch written; exec sleep 600")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "written").exists())
    identities = run.identities()
    assert identities is not None and identities[0].send(SIGKILL)
    await until_async(lambda: not identities[1].alive())
    assert _mounted(_private(run))
    tidy(StateFolder(config.state_dir), config)
    assert not _private(run).exists() and not _mounted(_private(run))


async def test_the_owner_gets_the_machine_without_files(lab: Lab) -> None:
    """When the owner is told that the machine is free, the files of tasks that were killed are removed."""
    config = lab.config(private_tmp=True, owner=OWNER)
    launch = description(lab.region, config, f"trap '' TERM; {_writes('x')}; touch written; while :; do sleep 1; done")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "written").exists())
        assert (_private(run) / "shm" / "x").exists()
        status = await _mizzen(config, "reclaim", "--now")
        assert status["free"] and status["shared_tmp"] is None
        assert not _private(run).exists() and not _mounted(_private(run))


async def test_the_owner_is_told_that_files_stay(lab: Lab) -> None:
    """`mizzen lend` says so if tasks share the machine's folders, and why."""
    config = lab.config(private_tmp=False, owner=OWNER)
    async with lab.agent(config):
        await until_async((config.state_dir / "owner.sock").exists)
        done = await asyncio.to_thread(_lent, config, "lend")
    why = "tasks.private_tmp is false in the settings"
    assert f"files of tasks in /tmp, /var/tmp and /dev/shm stay: {why}" in done.stdout.splitlines()


def test_a_machine_that_cannot_mount_says_why(tmp_path: Path) -> None:
    """Without the capability to mount, as in most containers, the reason names it; with it there is none."""
    assert scratch.why_shared(str(tmp_path / "probe")) is None
    assert not (tmp_path / "probe").exists()
    root = str(Path(agent.__file__).parents[1])
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(24, 21, 0, 0, 0); sys.path.insert(0, sys.argv[1])\n"
        "from agent.scratch import why_shared; print(why_shared(sys.argv[2]))"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, root, str(tmp_path / "probe")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("this machine does not allow mounts (") and "not permitted" in done.stdout
    assert not (tmp_path / "probe").exists()


def test_other_users_cannot_enter_private_folders(tmp_path: Path) -> None:
    """The files of an attempt are out of reach by their path on the machine, also if the folder was open before."""
    tmp_path.chmod(0o711)
    folder = tmp_path / "private"
    folder.mkdir(mode=0o711)
    lock = scratch.hold(str(folder))
    for place in scratch.PLACES:
        (folder / place / "x").write_text("secret")
        # The folder is entered as root, because those above it are closed to others.
        read = ["cat", f"private/{place}/x"]
        done = subprocess.run(read, cwd=tmp_path, user=65534, group=65534, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, ""), done.stdout
    assert not scratch.clear(str(folder)) and (folder / "tmp" / "x").exists(), "somebody holds it"
    scratch.release(lock, str(folder))
    assert not folder.exists()


def test_folders_without_their_lock_are_removed(tmp_path: Path) -> None:
    """Also those of which somebody has deleted all but what is mounted."""
    lock = scratch.hold(str(tmp_path / "private"))
    os.close(lock)
    subprocess.run(["rm", "-rf", str(tmp_path / "private")], stderr=subprocess.DEVNULL, check=False)
    assert [path.name for path in (tmp_path / "private").iterdir()] == ["shm"]
    cleared = scratch.clear(str(tmp_path / "private"))
    subprocess.run(["umount", "-q", str(tmp_path / "private" / "shm")], stderr=subprocess.DEVNULL, check=False)
    assert cleared and not (tmp_path / "private").exists()


def test_shims_that_come_and_go_share_folders(tmp_path: Path) -> None:
    """A shim that holds the folders has all of them, while others remove them again and again."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from agent.scratch import PLACES, hold, release\n"
        "for _ in range(200):\n"
        "    lock = hold(sys.argv[2])\n"
        "    assert sorted(os.listdir(sys.argv[2])) == sorted([*PLACES, 'lock', 'making'])\n"
        "    release(lock, sys.argv[2])"
    )
    root = str(Path(agent.__file__).parents[1])
    argv = [sys.executable, "-I", "-S", "-c", code, root, str(tmp_path / "private")]
    shims = [subprocess.Popen(argv) for _ in range(3)]
    assert [shim.wait(60) for shim in shims] == [0, 0, 0]
    assert scratch.clear(str(tmp_path / "private"))
