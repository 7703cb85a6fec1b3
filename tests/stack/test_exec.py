"""`mizzen exec` and `mizzen port-forward` on a running stack, in sandboxes."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml

from agent.sessions.session_shim import set_size
from infra.stack.ports import free_port
from mizzen_client.errors import Unreachable
from mizzen_client.remote_command import run_command
from mizzen_client.tunnel.frames import WINDOW_BYTES
from tests.stack.harness import Up, processes_of, wait_until

pytestmark = [pytest.mark.rotating, pytest.mark.stack, pytest.mark.timeout(300)]
_COMMAND = Path(sys.executable).parent / "mizzen"
_FLEET = """
version: 1
regions: [{name: east, clusters: [{name: a, machines: [{name: m, count: 2, gpus: 2, gpu_type: a100, cpus: 8,
  memory: 4GiB}]}]}]
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack whose tasks run in sandboxes."""
    up = Up(tmp_path_factory.mktemp("exec"), _FLEET, lost_s=120)
    config = up.folder / "config.yaml"
    config.write_text(config.read_text().replace("isolation: none", "isolation: sandbox"))
    try:
        up.start()
        up.client().set_tenant("t", 3, {"a100": 4}, None)
        up.client().set_tenant("other", 3, {"a100": 4}, None)
        yield up
        assert up.interrupt() == 0
    finally:
        up.close()


def running(stack: Up, run: str | list[str] = "sleep 600", **job: Any) -> str:
    """Submits a workload, and waits until it runs; returns its id."""
    resources = {"cpus": 0.1, "memory": "64MiB"}
    document = {"version": 1, "name": "target", "tenant": "t"}
    document["jobs"] = [{"name": "main", "resources": resources, "run": run, **job}]
    id_ = str(stack.client().submit(document)["id"])
    wait_until(lambda: stack.phase(id_) == "running", "the workload runs")
    return id_


def command(stack: Up, *arguments: str, key: str | None = None, **options: Any) -> "subprocess.Popen[bytes]":
    """Starts a command of the client."""
    environ = {**os.environ, "MIZZEN_API": stack.client().url}
    environ["MIZZEN_API_KEY"] = key or (stack.data / "operator.key").read_text().strip()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([_COMMAND, *arguments], env=environ, **{**pipes, **options})


def test_a_command_runs_in_the_task(stack: Up) -> None:
    """With pipes: streams apart, binary-safe, and its status is that of the command."""
    id_ = running(stack)
    data = bytes(range(256)) * 4000
    script = "echo hi; echo err >&2; cat; exit 7"
    out, err = (process := command(stack, "exec", id_, "--", "sh", "-c", script)).communicate(data, 60)
    assert (process.returncode, out, err) == (7, b"hi\n" + data, b"err\n")
    stack.client().cancel(id_)


def test_a_slow_reader_gets_everything(stack: Up) -> None:
    """Also what it has not read when the command has ended and the session is closed."""
    id_ = running(stack)
    size = WINDOW_BYTES - 1000
    process = command(stack, "exec", id_, "--", "head", "-c", str(size), "/dev/zero")
    assert process.stdout is not None and os.read(process.stdout.fileno(), 1)
    time.sleep(1)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, len(out), err) == (0, size - 1, b"")
    stack.client().cancel(id_)


class Terminal:
    """A command of the client on a terminal of this test."""

    def __init__(self, stack: Up, *arguments: str, rows: int = 24, columns: int = 80) -> None:
        self._master, slave = pty.openpty()
        set_size(self._master, rows, columns)
        self.process = command(
            stack, *arguments, stdin=slave, stdout=slave, stderr=slave, preexec_fn=partial(_control, slave)
        )
        os.close(slave)
        self.output = b""

    def resize(self, rows: int, columns: int) -> None:
        """Changes the size of the window."""
        set_size(self._master, rows, columns)

    def type(self, text: bytes) -> None:
        """Presses keys."""
        os.write(self._master, text)

    def until(self, words: bytes) -> bytes:
        """Reads until the output since the last call contains `words`; returns it."""
        while words not in self.output:
            ready, _, _ = select.select([self._master], [], [], 30)
            more = self._read() if ready else b""
            assert more, f"{words!r} is missing in {self.output!r}"
            self.output += more
        found, _, self.output = self.output.partition(words)
        return found

    def end(self) -> int:
        """Reads to the end; returns the status."""
        while more := self._read():
            self.output += more
        os.close(self._master)
        return self.process.wait(30)

    def _read(self) -> bytes:
        try:
            return os.read(self._master, 65536)
        except OSError:
            return b""


def _control(terminal: int) -> None:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_a_shell_on_a_terminal(stack: Up) -> None:
    """The size of the window arrives and follows, Ctrl-C reaches the process, and the status of the shell comes out."""
    id_ = running(stack)
    shell = Terminal(stack, "exec", id_, "--", "bash", "--norc", rows=33, columns=101)
    shell.type(b"stty size; tty; echo T=$TERM; echo rea''dy\n")
    shown = shell.until(b"ready\r\n")
    assert b"33 101" in shown and b"/dev/pts/" in shown, shown
    shell.resize(44, 120)
    shell.type(b"stty size; echo siz''ed\n")
    assert b"44 120" in shell.until(b"sized\r\n")
    shell.type(b"sleep 100; echo co''de $?\n")
    time.sleep(0.5)
    shell.type(b"\x03")
    shell.type(b"echo co''de $?\n")
    assert b"code 130" in shell.until(b"code 130") + b"code 130"
    shell.type(b"exit 7\n")
    assert shell.end() == 7, shell.output
    stack.client().cancel(id_)


def test_signals_and_isolation(stack: Up) -> None:
    """Without a terminal SIGTERM reaches the command. It is in the task's namespaces, cgroups, user and folder."""
    script = """
for ns in pid mnt ipc uts; do readlink /proc/self/ns/$ns; done; cat /proc/self/cgroup; id -u; pwd
grep -E 'NoNewPrivs|Seccomp:|CapEff' /proc/self/status; echo "$WORD $MIZZEN_RUN_ID $SECRET"
ls /home /root /var 2>&1 || true
"""
    stack.client().set_secret("t", "token", "hunter2-secret")
    id_ = running(stack, f"{script}\necho done; exec sleep 600", env={"WORD": "hello"}, secrets={"SECRET": "token"})
    wait_until(lambda: b"done" in list(stack.client().logs(id_)), "the task has printed its view")
    own = [line for line in stack.client().logs(id_) if line != b"done"]
    out, err = command(stack, "exec", id_, "--", "sh", "-c", script).communicate(timeout=60)
    shown = [line.replace(b"hunter2-secret", b"***") for line in out.splitlines()]
    assert [line for line in own if b"hunter2" in line] == []
    assert len(shown) == len(own) and all(a == b or b"*" in b for a, b in zip(shown, own, strict=True)), (
        out.decode(),
        own,
        err,
    )
    assert b"hello " in out and b"hunter2-secret" in out
    process = command(stack, "exec", id_, "--", "sh", "-c", "trap 'echo got; exit 5' TERM; echo up; sleep 60 & wait")
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=60)[0], process.returncode) == (b"got\n", 5)
    entries = [one for one in stack.client().audit(50) if one["target"] == id_]
    [begun] = [one for one in entries if "trap" in str(one["detail"].get("command"))]
    assert (begun["action"], begun["detail"]["task"]) == ("session.exec", 0)
    [ended] = [
        e for e in entries if e["action"] == "session.end" and e["detail"]["session"] == begun["detail"]["session"]
    ]
    assert ended["detail"]["exit_code"] == 5 and ended["detail"]["bytes_out"] > 0
    command(stack, "exec", id_, "--", "echo", "xhunter2-secretx").communicate(timeout=60)
    texts = str([one["detail"] for one in stack.client().audit(50)])
    assert "x***x" in texts and "hunter2" not in texts
    stack.client().cancel(id_)


def test_who_may(stack: Up) -> None:
    """Another tenant does not find the workload; a viewer may not; a token is used once."""
    id_ = running(stack)
    operator = stack.client()
    for role, tenant, status in (("submitter", "other", 3), ("viewer", "t", 4)):
        key = operator.create_key(role, tenant)["key"]
        process = command(stack, "exec", id_, "--", "true", key=key)
        assert (process.communicate(timeout=60)[0], process.returncode) == (b"", status)
    process = command(stack, "exec", id_, "--task", "3", "--", "true")
    assert b"must be at most 0" in process.communicate(timeout=60)[1] and process.returncode == 2
    opened = operator.request_session(id_)
    assert run_command(operator, opened, ["true"], terminal=False) == 0
    with pytest.raises(Unreachable, match="used already"):
        run_command(operator, opened, ["true"], terminal=False)
    operator.cancel(id_)
    wait_until(lambda: stack.phase(id_) == "cancelled", "it has ended")
    process = command(stack, "exec", id_, "--", "true")
    assert b"its tasks do not run" in process.communicate(timeout=60)[1] and process.returncode == 5


def _sessions(stack: Up) -> int:
    url = str(yaml.safe_load((stack.data / "run" / "settings.yaml").read_text())["database"])
    with psycopg.connect(url) as connection:
        return int(connection.execute("select count(*) from task_session").fetchone()[0])  # type: ignore[index]


def test_the_end_of_a_side_leaves_nothing(stack: Up) -> None:
    """Killed clients, ended tasks and preemptions leave no process and no row, and the client says why."""
    id_ = running(stack)
    mark = f"sleep 7{time.time_ns() % 10**9}"

    def there() -> bool:
        return any(mark in text for text in processes_of(stack.data).values()) or mark in _all_commands()

    process = command(stack, "exec", id_, "--", "sh", "-c", f"trap '' HUP; ({mark} &) ; echo up; {mark}")
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert there()
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not there(), "the processes of the session have ended")
    wait_until(lambda: _sessions(stack) == 0, "the row is gone")
    process = command(stack, "exec", id_, "--", "sh", "-c", f"echo up; {mark}")
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    stack.client().preempt(id_)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 255
    assert b"preempt" in err.lower(), err
    assert not there() and _sessions(stack) == 0
    stack.client().cancel(id_)


def _all_commands() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(found)


def test_ports_are_forwarded(stack: Up) -> None:
    """Several connections at a time, each with its own data; one that nothing reads delays no other."""
    port = free_port()
    program = f"""
import socketserver
class Echo(socketserver.StreamRequestHandler):
    rbufsize = 0
    def handle(self):
        first = self.rfile.readline()
        if first == b"stall\\n":
            import time; time.sleep(600)
        while data := self.request.recv(65536): self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
Server(("127.0.0.1", {port}), Echo).serve_forever()
"""
    id_ = running(stack, ["python3", "-c", program])
    wait_until(lambda: socket.create_connection(("127.0.0.1", port)).close() is None, "the program listens")
    process = command(stack, "port-forward", id_, f"0:{port}", "0:1")
    assert process.stderr is not None
    local, refused = (int(process.stderr.readline().split()[1].rpartition(b":")[2]) for _ in range(2))
    data = os.urandom(3 << 20)
    with socket.create_connection(("127.0.0.1", local)) as stalled:
        stalled.sendall(b"stall\n")
        stalled.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stalled.send(bytes(65536))
        with ThreadPoolExecutor(4) as pool:
            for echoed in pool.map(partial(_echo, local), [data] * 4):
                assert echoed == data
    with socket.create_connection(("127.0.0.1", refused)) as connection:
        assert connection.recv(1) == b""
    assert b"port 1" in process.stderr.readline()
    again = command(stack, "port-forward", id_, f"{local}:{port}")
    assert b"LOCAL:PORT takes another local port" in again.communicate(timeout=60)[1] and again.returncode == 2
    with socket.create_connection(("127.0.0.1", local)) as kept:
        kept.sendall(b"\nx")
        assert kept.recv(1) == b"x"
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.communicate(timeout=30)[1]
    assert process.returncode == 130
    wait_until(lambda: _sessions(stack) == 0, "the row is gone")
    stack.client().cancel(id_)


def _echo(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        got = bytearray()
        sender = threading.Thread(target=lambda: (connection.sendall(b"\n" + data), connection.shutdown(1)))
        sender.start()
        while more := connection.recv(65536):
            got += more
        sender.join()
        return bytes(got)


def test_an_interactive_workload(stack: Up) -> None:
    """It ends with the command and its status; without a terminal it ends after a while."""
    options = ("run", "--interactive", "--gpus", "1", "--tenant", "t", "--no-files", "--memory", "64MiB")
    shell = Terminal(stack, *options, "--", "sh", "-c", "stty size; echo gpu=$CUDA_VISIBLE_DEVICES; exit 7")
    assert shell.end() == 7, shell.output
    assert b"24 80" in shell.output and b"gpu=0" in shell.output, shell.output
    id_ = shell.output.partition(b" as ")[2].split()[0].decode()
    wait_until(lambda: stack.phase(id_) == "failed", "the workload has ended with the command")
    left = Terminal(stack, *options, "--linger", "3s", "--", "sh", "-c", "echo he''re; exec sleep 600")
    left.until(b"here")
    id_ = next(one["id"] for one in stack.client().workloads(tenant="t") if one["phase"] == "running")
    left.process.kill()
    left.end()
    wait_until(lambda: stack.phase(id_) == "succeeded", "the workload has ended without a terminal")
    said = b"no terminal was connected for 3 s: the workload ends"
    wait_until(lambda: said in list(stack.client().logs(id_)), "the task has said why")


@contextlib.contextmanager
def second_api(stack: Up, **api: str) -> Iterator[tuple["subprocess.Popen[bytes]", dict[str, str]]]:
    """Runs another API process of the installation; gives it, and the environment of its clients."""
    settings = yaml.safe_load((stack.data / "run" / "settings.yaml").read_text())
    settings["api"] |= {"port": free_port(), **api}
    file = stack.data / "run" / "second.yaml"
    file.write_text(yaml.safe_dump(settings))
    url = f"http://127.0.0.1:{settings['api']['port']}"
    key = (stack.data / "operator.key").read_text().strip()
    arguments = [sys.executable, "-m", "server", "api", "--config", str(file)]
    with (stack.folder / "second.log").open("w") as log, subprocess.Popen(arguments, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: httpx.get(f"{url}/readyz").is_success, "the second process is ready")
            yield process, {**os.environ, "MIZZEN_API": url, "MIZZEN_API_KEY": key}
        finally:
            process.kill()


@pytest.mark.long
def test_two_api_processes(stack: Up) -> None:
    """The client may be connected to another process than the agent. A killed process leaves nothing."""
    id_ = running(stack)
    with second_api(stack, agents_url=stack.client().url) as (second, environ):
        words, data = [_COMMAND, "exec", id_, "--", "sh", "-c"], os.urandom(1 << 20)
        done = subprocess.run([*words, "cat; exit 9"], env=environ, input=data, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout) == (9, data), done.stderr
        mark = f"sleep 8{time.time_ns() % 10**9}"
        with subprocess.Popen([*words, f"echo up; {mark}"], env=environ, stdout=-1, stderr=-1) as process:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            second.kill()
            assert b"was lost" in process.communicate(timeout=60)[1] and process.returncode == 255
    wait_until(lambda: mark not in _all_commands(), "the command has ended")
    wait_until(lambda: _sessions(stack) == 0, "the row is deleted", 120)
    stack.client().cancel(id_)


@pytest.mark.long
def test_a_machine_that_cannot_reach_the_api(stack: Up) -> None:
    """The user sees the machine and the address."""
    id_ = running(stack)
    with second_api(stack, agents_url="http://127.0.0.1:9") as (_, environ):
        done = subprocess.run([_COMMAND, "exec", id_, "--", "true"], env=environ, capture_output=True, timeout=60)
    assert b"cannot connect to the API at http://127.0.0.1:9" in done.stderr and done.returncode == 255, done.stderr
    stack.client().cancel(id_)
