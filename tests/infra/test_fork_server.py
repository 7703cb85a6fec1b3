"""The fork server: parts are like new processes, and neither it nor the supervisor can be lost without consequence."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import children
from tests.stack.harness import wait_until

_PART = "tests.infra.forked_part"
_SUPERVISOR = """
import asyncio, json, os, signal, subprocess, sys, time
from pathlib import Path
from infra import children
from infra.stack import fork_server
from infra.stack.fork_server import ForkServer
from infra.stack.supervisor import Child, Supervisor, dies_with_parent

def part(forks, *words, environment=None, inherited=None, umask=-1):
    with log.open("ab") as file:
        environment = {**children.environment(), **(environment or {})}
        return forks.launch(words, file, environment, inherited or {}, umask)

def child(*words):
    command = [*dies_with_parent(), *children.python("-m", PART, *words)]
    return Child("part", command, log, arguments=words)

async def main():
    await forks.ready()
BODY

PART, log = sys.argv[1], Path(sys.argv[2])
forks = ForkServer.start(PART, IMPORTS)
asyncio.run(main())
"""


@contextlib.contextmanager
def _supervisor(log: Path, body: str, imports: str = "['json']") -> Iterator[subprocess.Popen[str]]:
    """Runs `body` in a process that has a fork server."""
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    script = _SUPERVISOR.replace("BODY", indented).replace("IMPORTS", imports)
    command = children.python("-c", script, _PART, str(log))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=children.environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def _said(log: Path, body: str, imports: str = "['json']") -> list[str]:
    """Returns the lines that `body` prints."""
    with _supervisor(log, body, imports) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.splitlines()


def _server_of(supervisor: int) -> int:
    """Returns the pid of the fork server."""
    text = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in text.split()}
    (server,) = (pid for pid, name in names.items() if name == "mizzen-forks")
    return server


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_has_what_a_new_process_has(tmp_path: Path) -> None:
    """Arguments, environment, descriptors, session, signals, command line and so on are those of a started process."""
    body = """
reading, writing = os.pipe()
words = ("facts", "a b", "ü")
more = {"MORE": "1", "TOLD_FD": "x"}
forked = part(forks, *words, environment=more, inherited={"TOLD_FD": writing}, umask=0o027)
assert forked.wait(30) == 0, log.read_text()
assert os.read(reading, 8) == b"+"
with log.open("ab") as file:
    environment = {**children.environment(), **more, "TOLD_FD": str(writing)}
    subprocess.run(children.python("-m", PART, *words), env=environment, stdin=subprocess.DEVNULL, stdout=file,
                   stderr=file, start_new_session=True, umask=0o027, pass_fds=[writing])
"""
    assert _said(tmp_path / "log", body) == []
    forked, started = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert forked == started
    assert forked["leads"] and forked["umask"] == 0o027 and forked["environment"]["MORE"] == "1"


def test_how_a_part_ended_is_known(tmp_path: Path) -> None:
    """Exit codes and signals are those that a process started by the supervisor would have; errors are in the log."""
    body = """
for words in (("exit", "0"), ("exit", "3"), ("raise", "the cause"), ("kill",)):
    print(part(forks, *words).wait(30))
sleeping = part(forks, "sleep")
print(sleeping.poll())
sleeping.send_signal(signal.SIGTERM)
print(sleeping.wait(30))
sleeping.kill()
"""
    assert _said(tmp_path / "log", body) == ["0", "3", "1", "-9", "None", "-15"]
    assert "ValueError: the cause" in (tmp_path / "log").read_text()


def test_parts_are_started_again_without_the_server(tmp_path: Path) -> None:
    """The server is killed: its parts get SIGTERM, and the supervisor starts them as new processes."""
    body = """
supervisor = Supervisor(forks=forks)
await supervisor.start(child("sleep"))
first = supervisor.children[0].process
print(first.pid, flush=True)
while supervisor.children[0].process is first or not supervisor.children[0].is_running():
    await asyncio.sleep(0.05)
print(first.returncode, type(supervisor.children[0].process).__name__, flush=True)
await supervisor.stop()
"""
    with _supervisor(tmp_path / "log", body) as process:
        assert process.stdout is not None
        part = int(process.stdout.readline())
        wait_until(lambda: "forked_part sleep" in Path(f"/proc/{part}/cmdline").read_text(), "the part has its title")
        os.kill(_server_of(process.pid), signal.SIGKILL)
        assert process.stdout.read().split() == [str(-signal.SIGTERM), "Popen"]
    assert not _runs(part)


def test_a_stopped_server_starts_nothing_later(tmp_path: Path) -> None:
    """A server that does not respond is not waited for, and does not start the part when it is continued."""
    body = """
fork_server._ANSWER_S = 0.3
server = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0])
sleeping = part(forks, "sleep")
os.kill(server, signal.SIGSTOP)
print(part(forks, "exit", "0"), part(forks, "exit", "0"))
os.kill(sleeping.pid, signal.SIGKILL)
print(sleeping.wait(30) < 0)
os.kill(server, signal.SIGCONT)
while Path(f"/proc/{server}/task/{server}/children").read_text().split():
    time.sleep(0.05)
print("nothing left")
"""
    assert _said(tmp_path / "log", body) == ["None None", "True", "nothing left"]


@pytest.mark.parametrize("stopped", [False, True])
def test_parts_die_with_the_supervisor(tmp_path: Path, stopped: bool) -> None:
    """The supervisor is killed: the kernel ends the server, even a stopped one, and its parts."""
    body = """
print(part(forks, "sleep").pid, flush=True)
time.sleep(600)
"""
    with _supervisor(tmp_path / "log", body) as process:
        assert process.stdout is not None
        part, server = int(process.stdout.readline()), _server_of(process.pid)
        if stopped:
            os.kill(server, signal.SIGSTOP)
        process.kill()
        wait_until(lambda: not _runs(server) and not _runs(part), "the server and its part have ended")


def test_without_its_imports_a_server_is_not_used(tmp_path: Path) -> None:
    """A module that cannot be imported is no error of the server: the part's own process will report it."""
    assert _said(tmp_path / "log", 'print(part(forks, "exit", "0"))', "['no_such_module']") == ["None"]
