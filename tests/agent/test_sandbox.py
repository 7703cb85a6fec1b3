"""Sandboxes: what the tasks of an attempt share and see, and that nothing of them stays."""

import asyncio
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from signal import SIGKILL

import pytest
from pydantic import ValidationError

import agent
from agent import sandbox, tasks
from agent.isolation import TENANT_UIDS, choose, why_not
from agent.old_attempts import tidy
from agent.sandbox import FOLDERS
from agent.sandbox_view import bubblewrap, sandbox_command
from agent.state import StateFolder
from agent.tasks import RunFolder
from domain.isolation import Isolation, sandbox_path
from domain.protocol.machines import NodeOutcome
from infra.config.scheduling import TaskSettings
from infra.errors import ConfigurationError
from tests.agent.harness import (
    PYTHON,
    Lab,
    description,
    ended,
    has_scopes,
    needs_sandbox,
    process_name,
    processes_of,
    task_launch,
    until,
    until_async,
    with_mounts,
)
from tests.agent.test_lending import OWNER, _lent, _mizzen

pytestmark = needs_sandbox
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
ROOT = str(Path(agent.__file__).parents[1])


def _writes(name: str) -> str:
    return "; ".join(f"test ! -e {place}/{name} && echo $RANK > {place}/{name}" for place in PLACES)


def _private(run: RunFolder) -> Path:
    return run.path.parent / "private"


def _holders(folder: Path) -> list[int]:
    return [pid for pid in processes_of(folder) if b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_the_tasks_of_an_attempt_share_a_sandbox(lab: Lab) -> None:
    """Tasks of one attempt share their temporary files, also after a restart of the agent.

    Other attempts do not see the files, and they are removed with the last task.
    """
    config, name = lab.config(isolation=Isolation.SANDBOX), f"x{uuid.uuid4().hex}"
    reads = " && ".join(f"test -s {place}/{name}" for place in PLACES)
    launch = description(
        lab.region, config,
        f"{_writes(name)}; while [ ! -e go ]; do sleep 0.05; done; echo done > {lab.folder}/bucket/c/seen",
        f"until {reads}; do sleep 0.05; done; touch read; while [ ! -e go ]; do sleep 0.05; done",
        checkpoint={"grace_s": 5, "keep": 2, "uri": f"{lab.bucket_url}/c"},
    )  # fmt: skip
    other = description(lab.region, config, _writes(name))
    (lab.folder / "bucket" / "c").mkdir(parents=True)
    (lab.folder / "bucket" / "c").chmod(0o777)
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
        assert _holders(_private(runs[0]))
        (runs[1].work / "go").touch()
        await until_async(lambda: runs[1].exit())
        assert (_private(runs[0]) / "tmp" / name).exists()  # The other task still runs.
        (runs[0].work / "go").touch()
        outcome = await running.result(NodeOutcome)
        assert all(exit_.succeeded for exit_ in outcome.exits)
        await until_async(lambda: not _private(runs[0]).exists())
    await until_async(lambda: not _holders(lab.folder))
    assert (lab.folder / "bucket" / "c" / "seen").read_text() == "done\n"  # The bucket is below /tmp, and is needed.


LOOK = """
cd /
ls -d /home /root /srv /mnt 2>/dev/null || true
touch /usr/x /etc/x /x "$HOME/../x" 2>/dev/null && echo wrote
ls /proc | grep -c '^[0-9]*$' | grep -qx '[1-9]' || echo many processes
grep -q 'NoNewPrivs:.1' /proc/self/status || echo privileges
unshare -U true 2>/dev/null && echo namespaces
$MIZZEN_PYTHON -c '
import errno, socket
for family, protocol in ((16, 0), (16, 11), (17, 0), (38, 0), (40, 0), (43, 0)):
    try:
        print(int(socket.socket(family, socket.SOCK_RAW, protocol).family))
    except OSError as error:
        error.errno == errno.EAFNOSUPPORT or print(family, error)'
$MIZZEN_PYTHON -c '
import ctypes, sys
sys.exit(ctypes.CDLL(None).syscall(248, b"user", b"x", b"y", 1, -3) < 0)' 2>/dev/null && echo keyring
echo again | tee -a /dev/stderr > /dev/null
cat LISTED/data && ! touch LISTED/x 2>/dev/null && touch WRITABLE/x && echo done
"""


async def test_a_task_sees_its_files_and_what_is_listed(lab: Lab) -> None:
    """Homes and other processes are not there, the system is read-only, and `tasks.paths` adds folders."""
    listed, writable = lab.folder / "listed", lab.folder / "writable"
    for path in (listed, writable):
        path.mkdir()
        path.chmod(0o777)
    (listed / "data").write_text("listed\n")
    config = lab.config(isolation=Isolation.SANDBOX, paths=(str(listed), f"{writable}:rw"))
    look = LOOK.replace("LISTED", str(listed)).replace("WRITABLE", str(writable))
    launch = description(lab.region, config, look)
    lab.write(launch)
    async with lab.agent(config):
        await (await lab.run(launch, config.machine)).result(NodeOutcome)
    output = lab.folder_of(launch, config).output.read_text().splitlines()
    homes = {line for line in ("/root", "/home") if sys.base_prefix.startswith(line) or str(ROOT).startswith(line)}
    assert [line for line in output if line not in homes] == ["16", "again", "listed", "done"]


async def test_a_task_sees_its_mounts_at_absolute_paths(lab: Lab) -> None:
    """The folder is writable, belongs to the task, and is not on the machine."""
    config = lab.config(isolation=Isolation.SANDBOX)
    look = "echo model > /own-mount/models/file && cat /own-mount/models/file && test -O /own-mount/models && ls -A"
    launch = with_mounts(description(lab.region, config, look), "/own-mount/models")
    lab.write(launch)
    async with lab.agent(config):
        await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert lab.folder_of(launch, config).output.read_text() == "model\n"
    assert not Path("/own-mount").exists()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (sys.base_prefix, "would hide"),
        (str(Path(sys.base_prefix).parent), "would hide"),
        ("/", "would hide"),
        (str(Path(os.__file__).parents[1]), "would hide"),
        (f"{sys.prefix}/new", "is in"),
        (f"{Path(os.__file__).parent}/json", "is in"),
        ("LISTED/new", "is in"),
        ("LISTED", "would hide"),
        ("FOLDER", "would hide"),
    ],
)
async def test_a_mount_in_or_above_folders_of_the_machine_is_refused(lab: Lab, path: str, why: str) -> None:
    """The error names the field and the path, the task does not start, and nothing is made in `tasks.paths`."""
    listed = lab.folder / "listed"
    listed.mkdir()
    config = lab.config(isolation=Isolation.SANDBOX, paths=(f"{listed}:rw",))
    path = path.replace("LISTED", str(listed)).replace("FOLDER", str(config.state_dir))
    launch = with_mounts(description(lab.region, config, "true"), path)
    lab.write(launch)
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
    assert f"file_mounts: {path}: it {why} " in str(failure)
    assert not lab.folder_of(launch, config).work.exists() and not list(listed.iterdir())


async def test_a_task_has_pseudo_terminals_of_its_own(lab: Lab) -> None:
    """Programs such as `script` work, and do not see the terminals of the machine."""
    config = lab.config(isolation=Isolation.SANDBOX)
    launch = description(lab.region, config, "script -qec 'tty; ls /dev/pts' /dev/null")
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert outcome.exits[0].succeeded
    assert lab.folder_of(launch, config).output.read_text().split() == ["/dev/pts/0", "0", "ptmx"]


@pytest.mark.skipif(not has_scopes(), reason="this kernel has no scopes of Landlock")
async def test_abstract_sockets_belong_to_an_attempt(lab: Lab) -> None:
    """A task can connect to an abstract socket of its own attempt, and not to one of another attempt."""
    config, name = lab.config(isolation=Isolation.SANDBOX), f"x{uuid.uuid4().hex}"
    serve = f"""exec {PYTHON} -c 'import socket, time
server = socket.socket(socket.AF_UNIX); server.bind("\\0{name}"); server.listen()
open("serves", "w").close()
while True: server.accept()[0].close()'"""
    ask = f"""{PYTHON} -c 'import socket
try:
    socket.socket(socket.AF_UNIX).connect("\\0{name}"); print("reached")
except OSError as error: print(error.strerror)'"""
    launch = description(lab.region, config, serve, f"until [ -e go ]; do sleep 0.05; done; {ask}")
    other = description(lab.region, config, ask)
    for each in (launch, other):
        lab.write(each)
    runs = [lab.folder_of(launch, config, task=task) for task in (0, 1)]
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: (runs[0].work / "serves").exists() and runs[1].identities())
        (runs[1].work / "go").touch()
        await until_async(runs[1].exit)
        await (await lab.run(other, config.machine)).result(NodeOutcome)
        await lab.stop(launch, config.machine, 1.0)
    assert runs[1].output.read_text() == "reached\n"
    assert lab.folder_of(other, config).output.read_text() == "Operation not permitted\n"


async def test_a_killed_shim_leaves_nothing(lab: Lab) -> None:
    """The agent removes the folders of an attempt whose shim was killed, and the sandbox ends with it."""
    config = lab.config(isolation=Isolation.SANDBOX)
    launch = description(lab.region, config, f"{_writes('x')}; setsid sleep 600 & touch written; sleep 600")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "written").exists())
        identities = run.identities()
        assert identities is not None and identities[0].send(SIGKILL)
        await running.result(NodeOutcome)
    assert not _private(run).exists()
    await until_async(lambda: not _holders(lab.folder))


@pytest.mark.skipif(not has_scopes(), reason="this kernel has no scopes of Landlock")
def test_a_killed_zygote_of_an_attempt_ends_no_task(tmp_path: Path) -> None:
    """Its task goes on and is stopped as usual. No further task starts in the sandbox, which would be in no scope."""
    attempt = tmp_path / "wl-1.1"
    runs = [RunFolder(attempt / f"main.{task}", "wl-1", 1, "main", task) for task in (0, 1)]
    for run in runs:
        run.work.mkdir(parents=True)
    command = _command(attempt / "private", tmp_path)
    launches = [
        task_launch(run, "sleep", "600", sandbox={"folder": str(attempt / "private"), "command": command})
        for run in runs
    ]
    tasks.start(runs[0], launches[0])
    (pid,) = [pid for pid in processes_of(attempt / "private") if process_name(pid) == "mizzen-attempt"]
    os.kill(pid, SIGKILL)
    until(lambda: pid not in processes_of(tmp_path))
    with pytest.raises(tasks.NotStarted, match="the process that started the attempt's first task was killed"):
        tasks.start(runs[1], launches[1])
    assert tasks.inspect(runs[0]) is tasks.TaskState.RUNNING
    tasks.request_stop(runs[0], 5.0, told=True)
    assert ended(runs[0]).signal == 15
    until(lambda: not processes_of(tmp_path) and not (attempt / "private").exists())


async def test_a_killed_holder_ends_its_tasks(lab: Lab) -> None:
    """Without its holder, an attempt has no namespaces: its tasks end, and are reported as lost."""
    config = lab.config(isolation=Isolation.SANDBOX)
    launch = description(lab.region, config, "touch written; sleep 600")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "written").exists())
        os.kill(json.loads((_private(run) / "holder.json").read_text())["pid"], SIGKILL)
        outcome: NodeOutcome = await running.result(NodeOutcome)
    assert (outcome.exits[0].exit_code, outcome.exits[0].signal) == (None, None)
    assert not _private(run).exists()


async def test_an_agent_that_starts_later_removes_them(lab: Lab) -> None:
    """If agent and shim have died, the next agent removes the folders, also if the control plane asks for nothing."""
    config = lab.config(isolation=Isolation.SANDBOX)
    launch = description(lab.region, config, f"{_writes('x')}; touch written; exec sleep 600")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "written").exists())
    identities = run.identities()
    assert identities is not None and identities[0].send(SIGKILL)
    await until_async(lambda: not identities[1].alive())
    await until_async(lambda: not _holders(lab.folder))
    assert _private(run).exists()
    tidy(StateFolder(config.state_dir), config)
    assert not _private(run).exists()


async def test_the_owner_gets_the_machine_without_files(lab: Lab) -> None:
    """When the owner is told that the machine is free, the files of tasks that were killed are removed."""
    config = lab.config(isolation=Isolation.SANDBOX, owner=OWNER)
    launch = description(lab.region, config, f"trap '' TERM; {_writes('x')}; touch written; while :; do sleep 1; done")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: (run.work / "written").exists())
        assert (_private(run) / "tmp" / "x").exists()
        status = await _mizzen(config, "reclaim", "--now")
        assert status["free"] and status["isolation"] == "sandbox"
        assert not _private(run).exists()


async def test_the_owner_is_told_that_files_stay(lab: Lab) -> None:
    """`mizzen lend` says so if tasks share the machine's folders."""
    config = lab.config(isolation=Isolation.NONE, tenant_uids=None, owner=OWNER)
    async with lab.agent(config):
        await until_async((config.state_dir / "owner.sock").exists)
        done = await asyncio.to_thread(_lent, config, "lend")
    why = "tasks run without a sandbox: their files in /tmp, /var/tmp and /dev/shm stay"
    assert why in done.stdout.splitlines()


def test_settings_of_mizzen_are_not_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is there, empty and read-only. The test uses another folder, which every machine has."""
    folder = "/usr/share"
    monkeypatch.setattr("agent.sandbox_view._SETTINGS", (folder,))
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    looks = f"ls -A {folder}; touch {folder}/x || echo read-only"
    done = subprocess.run([*_command(tmp_path), "/bin/sh", "-c", looks], capture_output=True, text=True, check=True)
    assert any(Path(folder).iterdir()) and done.stdout == "read-only\n"


async def test_a_task_is_not_started_with_less_isolation_than_it_requires(lab: Lab) -> None:
    """Not on a machine whose mode was another one when the workload was placed there."""
    config = lab.config(isolation=Isolation.NONE, tenant_uids=None)
    launch = description(lab.region, config, "touch ran", isolation=Isolation.SANDBOX)
    lab.write(launch)
    async with lab.agent(config):
        failure = await (await lab.run(launch, config.machine, attempts=1)).failure()
    assert failure.type == "MachineFault"
    assert "isolation none of" in str(failure) and "weaker than sandbox" in str(failure)
    assert not (lab.folder_of(launch, config).work / "ran").exists()


def test_the_strongest_mode_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the strongest; a mode that is not possible is refused if it was set, or if the machine is lent."""
    uid = TENANT_UIDS[0] if os.geteuid() == 0 else None
    tmp_path.chmod(0o700)  # Sandboxes also work where the state folder is closed to others.
    assert choose(None, tmp_path, uid=uid, is_lent=True) == (Isolation.SANDBOX, "")
    assert choose(Isolation.NONE, tmp_path, uid=uid, is_lent=True) == (Isolation.NONE, "")
    assert not list(tmp_path.iterdir())
    why_not.cache_clear()
    monkeypatch.setattr("agent.isolation.bubblewrap", lambda: None)
    mode, why = choose(None, tmp_path, uid=uid, is_lent=False)
    assert mode is not Isolation.SANDBOX and why.startswith("bubblewrap is not installed")
    with pytest.raises(ConfigurationError, match="isolation sandbox: not possible on this machine: bubblewrap is not"):
        choose(Isolation.SANDBOX, tmp_path, uid=uid, is_lent=False)
    with pytest.raises(ConfigurationError, match=r"a lent machine needs a sandbox.*set isolation to user or none"):
        choose(None, tmp_path, uid=uid, is_lent=True)
    why_not.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0, reason="root without a capability")
def test_a_machine_that_cannot_mount_says_why(tmp_path: Path) -> None:
    """Without the capability to mount, as in most containers, the reason names what bubblewrap could not do."""
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(24, 21, 0, 0, 0); sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from agent.isolation import why_not; from domain.isolation import Isolation\n"
        "print(why_not(Isolation.SANDBOX, Path(sys.argv[2]), 2_000_000))"
    )
    argv = [sys.executable, "-I", "-c", code, ROOT, str(tmp_path / "probe")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("this machine does not allow sandboxes ("), done.stdout
    assert not list((tmp_path / "probe").iterdir())


@pytest.mark.parametrize("path", ["data", "/a/../b", "/", "/home", "/proc/1", "/data:ro", "/tmp"])
def test_paths_that_are_not_folders_for_tasks_are_refused(path: str) -> None:
    """They are relative, too wide, or have an unknown mode."""
    with pytest.raises(ValueError, match=path.partition(":")[0]):
        sandbox_path(path)
    with pytest.raises(ValidationError, match="paths"):
        TaskSettings.model_validate({"paths": [path]})
    assert sandbox_path("/mnt/data:rw") == ("/mnt/data", True)


def _command(private: Path, *writes: Path) -> list[str]:
    program = bubblewrap()
    assert program is not None
    return sandbox_command(program, private, reads=[], writes=map(str, writes))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as another user")
def test_other_users_cannot_enter_private_folders(tmp_path: Path) -> None:
    """The files of an attempt are out of reach by their path on the machine, also if the folder was open before."""
    tmp_path.chmod(0o711)
    folder = tmp_path / "private"
    folder.mkdir(mode=0o711)
    held = sandbox.hold(str(folder), _command(folder))
    for place in sandbox.FOLDERS:
        (folder / place / "x").write_text("secret")
        # The folder is entered as root, because those above it are closed to others.
        read = ["cat", f"private/{place}/x"]
        done = subprocess.run(read, cwd=tmp_path, user=65534, group=65534, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, ""), done.stdout
    assert not sandbox.clear(str(folder)) and (folder / "tmp" / "x").exists(), "somebody holds it"
    held.release()
    assert not folder.exists()


def test_shims_that_come_and_go_share_a_sandbox(tmp_path: Path) -> None:
    """A shim that holds a sandbox can join it, while others let it go again and again."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from agent.sandbox import FOLDERS, hold\n"
        "for _ in range(40):\n"
        "    held = hold(sys.argv[2], sys.argv[3:])\n"
        "    assert {*FOLDERS, 'lock', 'making', 'holder.json'} <= set(os.listdir(sys.argv[2]))\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        held.fork_inside()\n"
        "        held.enter()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "    held.release()"
    )
    private = tmp_path / "private"
    argv = [sys.executable, "-I", "-S", "-c", code, ROOT, str(private), *_command(private)]
    shims = [subprocess.Popen(argv) for _ in range(3)]
    assert [shim.wait(60) for shim in shims] == [0, 0, 0]
    assert sandbox.clear(str(private))
