"""Tasks and their shims: started once, followed until they end, and stopped without leftover processes."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from agent import shim, tasks
from agent.cgroups import make_cgroup
from agent.outcomes import outcome
from agent.processes import ProcessIdentity
from agent.task_setup import CANNOT_RUN
from agent.tasks import RunFolder, TaskState
from agent.zygote_client import start_shim
from tests.agent.harness import STUBBORN, ended, processes_of, python, run_folder, task_launch, until, zygotes


@pytest.mark.parametrize(
    ("code", "exit_code", "signum"),
    [
        ("pass", 0, None),
        ("raise SystemExit(3)", 3, None),
        ("import os; os.kill(os.getpid(), 9)", None, 9),
        ("import os; os.abort()", None, 6),
    ],
)
def test_the_status_is_kept(tmp_path: Path, code: str, exit_code: int | None, signum: int | None) -> None:
    """A task's folder has its exit code or signal; the starter's only child is its zygote, without any zombies."""
    before = shim.descendants({os.getpid()}) - zygotes()
    run = run_folder(tmp_path)
    tasks.start(run, python(run, code))
    exit_ = ended(run)
    assert (exit_.exit_code, exit_.signal, exit_.started) == (exit_code, signum, True)
    assert tasks.inspect(run) is TaskState.ENDED
    until(lambda: shim.descendants({os.getpid()}) - zygotes() <= before)
    assert len(zygotes()) == 1


@pytest.mark.parametrize("argv", [("no-such-command",), ("./no-such-file",), ("/",)])
def test_a_command_that_cannot_run(tmp_path: Path, argv: tuple[str, ...]) -> None:
    """A command that cannot be executed ends with code 127 and says why in the task's output."""
    run = run_folder(tmp_path)
    tasks.start(run, task_launch(run, *argv))
    assert ended(run).exit_code == CANNOT_RUN
    assert f"cannot run {argv[0]!r}" in run.output.read_text()


def test_a_task_starts_at_most_once(tmp_path: Path) -> None:
    """If a task is started several times, concurrently or later, its command runs once."""
    run = run_folder(tmp_path)
    launch = python(run, "open('starts', 'a').write('x'); import time; time.sleep(0.3)")
    starters = [threading.Thread(target=tasks.start, args=(run, launch)) for _ in range(6)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert tasks.inspect(run) is TaskState.RUNNING
    ended(run)
    tasks.start(run, launch)
    assert (run.work / "starts").read_text() == "x"


def test_what_a_task_leaves_behind_is_killed(tmp_path: Path) -> None:
    """Children in other sessions, adopted or not, are dead when the task's end is written."""
    run = run_folder(tmp_path)
    tasks.start(run, python(run, STUBBORN.replace('print("ready", flush=True)', "raise SystemExit(5)")))
    assert ended(run).exit_code == 5
    until(lambda: processes_of(tmp_path) == [])


def test_the_task_has_a_session_of_its_own_and_default_signals(tmp_path: Path) -> None:
    """A task leads its own session and group, has no terminal input, and has no blocked or ignored signals."""
    run = run_folder(tmp_path)
    code = (
        "import os, signal, sys\n"
        "assert os.getsid(0) == os.getpgrp() == os.getpid(), 'session'\n"
        "assert sys.stdin.read() == '', 'stdin'\n"
        "assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), 'mask'\n"
        "status = dict(line.split(':\\t') for line in open('/proc/self/status') if ':\\t' in line)\n"
        "bits = int(status['SigIgn'], 16)\n"
        # Excludes the two signals that Python itself ignores; signals 32 and 33 are reserved by the C library.
        "usual = {signal.SIGPIPE, signal.SIGXFSZ}\n"
        "ignored = [number for number in signal.valid_signals() - usual if bits >> number - 1 & 1]\n"
        "assert ignored == [], ignored\n"
        "assert sorted(os.listdir('/proc/self/fd'))[:3] == ['0', '1', '2'] and len(os.listdir('/proc/self/fd')) <= 4\n"
    )
    tasks.start(run, python(run, code))
    assert ended(run).exit_code == 0, run.output.read_text()


def test_notice_and_a_clean_end(tmp_path: Path) -> None:
    """A task that ends by itself within its grace period keeps its exit status, and its deadline is not awaited."""
    run = run_folder(tmp_path)
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    tasks.start(run, python(run, code))
    until(lambda: "ready" in run.output.read_text())
    tasks.request_stop(run, 600, told=True)
    assert ended(run).exit_code == 143
    stop = run.stop()
    assert stop is not None and stop.told


def test_a_task_that_has_ended_by_itself_was_not_stopped(tmp_path: Path) -> None:
    """A stop that arrives between a task's end and its record has no effect: the task counts as succeeded."""
    run = run_folder(tmp_path)
    tasks.start(run, python(run, "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n"))
    identities = run.identities()
    assert identities is not None
    above, task = identities
    above.send(signal.SIGSTOP)
    (run.work / "go").touch()
    until(lambda: (stat := shim.process_stat(task.pid)) is None or stat[0] == "Z")
    tasks.request_stop(run, 600, told=True)
    above.send(signal.SIGCONT)
    assert ended(run).succeeded
    assert not outcome("m", [run], None).stopped


@pytest.mark.parametrize("told", [True, False])
def test_a_task_that_saved_because_it_was_told_was_stopped(tmp_path: Path, told: bool) -> None:
    """Exit code 0 after a notice of the control plane or the agent is no success: work may be left undone."""
    run = run_folder(tmp_path)
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    tasks.start(run, python(run, code))
    until(lambda: "ready" in run.output.read_text())
    tasks.request_stop(run, 600, told=told)
    assert ended(run).succeeded
    assert outcome("m", [run], None).stopped


def test_a_stubborn_task_is_killed_with_all_its_kin(tmp_path: Path) -> None:
    """After the grace period, SIGKILL reaches a task that ignores SIGTERM and its grandchildren in other sessions."""
    run = run_folder(tmp_path)
    tasks.start(run, python(run, STUBBORN))
    until(lambda: "ready" in run.output.read_text())
    # The shim, the task, three children and three grandchildren; the last may start after the output "ready".
    until(lambda: len(processes_of(tmp_path)) == 8)
    tasks.request_stop(run, 0.3, told=True)
    assert ended(run).signal == signal.SIGKILL
    until(lambda: processes_of(tmp_path) == [])


def test_the_grace_is_for_the_whole_group(tmp_path: Path) -> None:
    """A trainer below a shell may save within the grace period, although the shell has exited at the notice."""
    run = run_folder(tmp_path)
    (run.work / "trainer.py").write_text(
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        "    open('saved', 'w').write('all of it')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    trainer = f"{sys.executable} -I -S trainer.py"
    tasks.start(run, task_launch(run, "/bin/sh", "-eu", "-c", f"{trainer}; echo never reached"))
    until(lambda: "ready" in run.output.read_text())
    tasks.request_stop(run, 600, told=True)
    assert ended(run).exit_code == 0  # The trainer's, not the shell's.
    assert (run.work / "saved").read_text() == "all of it"


SAVES_WITH_LOADERS = """
import os, signal, sys, time
def loader():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    open(f"loader.{os.getpid()}", "w").close()
    time.sleep(600)
def save(*_):
    time.sleep(0.5)
    alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in loaders]
    open("saved", "w").write(f"{sum(alive)} of {len(loaders)} loaders")
    sys.exit(143)
loaders = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        loader()
    loaders.append(pid)
while len([name for name in os.listdir(".") if name.startswith("loader.")]) < 2:
    time.sleep(0.01)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    "argv",
    [
        ("{python}", "-I", "-S", "trainer.py"),
        ("/bin/sh", "-eu", "-c", "{python} -I -S trainer.py; echo never reached"),
        ("/bin/sh", "-c", "/bin/sh -c '{python} -I -S trainer.py; true'; true"),
        ("{python}", "-I", "-S", "-c", "import subprocess; subprocess.run(['{python}', '-I', '-S', 'trainer.py'])"),
    ],
    ids=["alone", "shell", "two shells", "launcher that dies"],
)
def test_the_notice_spares_data_loaders(tmp_path: Path, argv: tuple[str, ...]) -> None:
    """The trainer gets the notice, however it was started, and its data loaders live until it has saved."""
    run = run_folder(tmp_path)
    (run.work / "trainer.py").write_text(SAVES_WITH_LOADERS)
    tasks.start(run, task_launch(run, *(part.replace("{python}", sys.executable) for part in argv)))
    until(lambda: "ready" in run.output.read_text())
    tasks.request_stop(run, 600, told=True)
    ended(run)
    assert (run.work / "saved").read_text() == "2 of 2 loaders", run.output.read_text()
    until(lambda: processes_of(tmp_path) == [])


def test_the_earliest_deadline_counts(tmp_path: Path) -> None:
    """A second, shorter notice shortens the grace period; a longer one does not prolong it."""
    run = run_folder(tmp_path)
    tasks.start(run, python(run, STUBBORN))
    until(lambda: "ready" in run.output.read_text())
    tasks.request_stop(run, 600, told=False)
    tasks.request_stop(run, 0, told=True)
    tasks.request_stop(run, 600, told=False)
    assert ended(run).signal == signal.SIGKILL
    stop = run.stop()
    assert stop is not None and stop.told


def test_a_stopped_process_hears_the_notice(tmp_path: Path) -> None:
    """A task that was halted by SIGSTOP is resumed so that it gets its notice."""
    run = run_folder(tmp_path)
    tasks.start(run, task_launch(run, "sleep", "600"))
    identities = run.identities()
    assert identities is not None
    identities[1].send(signal.SIGSTOP)
    tasks.request_stop(run, 600, told=True)
    assert ended(run).signal == signal.SIGTERM


def test_a_task_that_was_stopped_before_its_start_never_starts(tmp_path: Path) -> None:
    """Stopping a task that was not started writes an end without a status, and a later start has no effect."""
    run = run_folder(tmp_path)
    tasks.request_stop(run, 0, told=True)
    tasks.start(run, python(run, "open('started', 'w')"))
    exit_ = ended(run)
    assert (exit_.started, exit_.exit_code, exit_.signal) == (False, None, None)
    assert list(run.work.iterdir()) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_a_shim_that_comes_late_does_nothing(tmp_path: Path, stopped: bool) -> None:
    """A late shim of an agent that died during a start does not run a task again, and does not run a stopped task."""
    run = run_folder(tmp_path)
    launch = python(run, "open('starts', 'a').write('x')")
    if stopped:
        tasks.request_stop(run, 0, told=True)
    else:
        tasks.start(run, launch)
        ended(run)
    with (run.path / "shim.log").open("ab") as log:
        assert start_shim(run.path, json.dumps(launch.to_json()).encode(), log.fileno(), sandboxed=False) == 0
    until(lambda: processes_of(tmp_path) == [])
    assert (run.work / "starts").exists() is not stopped
    assert stopped or (run.work / "starts").read_text() == "x"


def test_an_end_before_the_notice_is_kept(tmp_path: Path) -> None:
    """A stop does not change the exit of a task that had already ended."""
    run = run_folder(tmp_path)
    tasks.start(run, python(run, "pass"))
    before = ended(run)
    tasks.request_stop(run, 0, told=True)
    assert run.exit() == before
    assert run.stop() is None


def test_a_sigterm_to_the_shim_alone_is_a_notice(tmp_path: Path) -> None:
    """SIGTERM to the shim, as in a shutdown, gives the task its grace period; then all its processes are killed."""
    run = run_folder(tmp_path)
    tasks.start(run, python(run, STUBBORN, grace_s=0.2))
    until(lambda: "ready" in run.output.read_text())
    identities = run.identities()
    assert identities is not None
    identities[0].send(signal.SIGTERM)
    assert ended(run).signal == signal.SIGKILL


@pytest.mark.parametrize("cgroup", [False, True])
def test_a_task_dies_with_its_shim(tmp_path: Path, cgroup: bool) -> None:
    """If a shim is killed, its task and all descendants are killed, and the exit has neither code nor signal."""
    run = run_folder(tmp_path)
    path = make_cgroup(run.run_id) if cgroup else None
    tasks.start(run, python(run, STUBBORN, cgroup=path))
    until(lambda: "ready" in run.output.read_text())
    identities = run.identities()
    assert identities is not None
    assert identities[0].send(signal.SIGKILL)
    until(lambda: not identities[1].alive())
    assert tasks.inspect(run) is TaskState.LOST
    settlers = [threading.Thread(target=tasks.end_lost, args=(run,)) for _ in range(3)]
    for settler in settlers:
        settler.start()
    for settler in settlers:
        settler.join()
    exit_ = ended(run)
    assert (exit_.started, exit_.exit_code, exit_.signal) == (True, None, None)
    assert processes_of(tmp_path) == []
    assert path is None or not Path(path).exists()


def test_a_cgroup_goes_with_its_task(tmp_path: Path) -> None:
    """Where cgroups can be created, a task has its own cgroup, which is removed when the task ends."""
    run = run_folder(tmp_path)
    path = make_cgroup(run.run_id)
    if path is None:
        pytest.skip("no cgroup v2 that this user may write to")
    tasks.start(run, python(run, "print(open('/proc/self/cgroup').read())", cgroup=path))
    assert ended(run).exit_code == 0
    assert f"mizzen-{run.run_id}" in run.output.read_text()
    assert not Path(path).exists()


def test_a_shim_that_does_not_act_is_overruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shim does not respond by the deadline, the agent kills the shim and the task, and no process is left."""
    run = run_folder(tmp_path)
    tasks.start(run, python(run, STUBBORN))
    until(lambda: "ready" in run.output.read_text())
    identities = run.identities()
    assert identities is not None
    identities[0].send(signal.SIGSTOP)
    tasks.request_stop(run, 0, told=True)
    assert not tasks.overdue(run)
    monkeypatch.setattr(tasks, "BACKSTOP_S", 0.0)
    until(lambda: tasks.overdue(run))
    tasks.force(run)
    assert not ended(run).succeeded
    assert processes_of(tmp_path) == []


def test_a_reused_pid_is_not_taken_for_the_task(tmp_path: Path) -> None:
    """A process with a recorded pid but another start time or boot gets no signal and does not count as the task."""
    me = ProcessIdentity.of(os.getpid())
    assert me.alive()
    for other in (ProcessIdentity(me.pid, me.start + 1, me.boot_id), ProcessIdentity(me.pid, me.start, "another boot")):
        assert not other.alive()
        assert not other.send(signal.SIGKILL)


def test_a_zombie_is_not_alive() -> None:
    """A zombie process does not count as running."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    stat = shim.process_stat(pid)
    assert stat is not None
    identity = ProcessIdentity(pid, stat[2], shim.boot_id())
    until(lambda: not identity.alive())
    os.waitpid(pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start tasks as another user")
def test_a_task_of_another_user(request: pytest.FixtureRequest) -> None:
    """A task runs as the configured user and may write to /dev/stdout, but cannot change its agent's files."""
    root = Path(tempfile.mkdtemp())  # Not below pytest's folder, which only its owner may enter.
    request.addfinalizer(lambda: shutil.rmtree(root))
    root.chmod(0o755)
    run = run_folder(root)
    os.chown(run.work, 65534, 65534)
    script = "id -u; id -g; echo more >> /dev/stdout; echo forged > ../exit.json || echo refused; touch mine"
    tasks.start(run, task_launch(run, "/bin/sh", "-c", script, uid=65534, gid=65534, groups=(65534,)))
    assert ended(run).exit_code == 0
    text = run.output.read_text()
    assert text.startswith("65534\n65534\nmore\n") and text.endswith("refused\n")
    assert (run.work / "mine").stat().st_uid == 65534
    until(lambda: processes_of(root) == [])


def test_a_shim_that_fails_says_why(tmp_path: Path) -> None:
    """If the shim cannot record its task, the start fails with the shim's output, and can be tried again."""
    run = run_folder(tmp_path)
    launch = python(run, "pass")
    broken = run.path / shim.PID_FILE
    hidden = RunFolder(run.path / "gone", run.workload_id, run.attempt, run.job, run.task)
    with pytest.raises(OSError, match="gone"):
        tasks.start(hidden, launch)
    assert not broken.exists()
    tasks.start(run, launch)
    assert ended(run).exit_code == 0


def test_time_is_shared_between_processes() -> None:
    """Deadlines use the clock since boot, which never goes backwards."""
    first = shim.boot_time_s()
    time.sleep(0.001)
    assert shim.boot_time_s() > first


def test_files_for_stdout_and_stderr(tmp_path: Path) -> None:
    """With a file for errors, the task's two outputs are appended to one file each; the agent's words are errors."""
    run = run_folder(tmp_path)
    command = ("sh", "-c", "echo out; echo err >&2; echo more; exec no-such-program")
    tasks.start(run, task_launch(run, *command, errors=str(run.errors)))
    assert ended(run).exit_code == 127
    assert run.output.read_text() == "out\nmore\n"
    assert run.errors.read_text().startswith("err\n") and "no-such-program" in run.errors.read_text()
    modes = {(path.stat().st_mode, path.stat().st_uid) for path in (run.output, run.errors)}
    assert len(modes) == 1
