"""The shim of a session: a small process that runs a command, or opens connections, as the task itself could.

The zygote of the task's attempt forks it, so it is in the same Landlock scope. It joins the task's cgroups, namespaces,
user and system call filter in the same way as the shim of a task (`agent.shim`), and talks to the agent by a socket
(SOCK_SEQPACKET) with JSON messages:

- It sends `{"started": PID}` with the descriptors of the command's terminal, or of its stdin, stdout and stderr;
  `{"error": WHY}` if it cannot; and `{"exit": CODE}` at the end, when no process of the session is left.
- It gets `{"signal": NUMBER}`, for the command and its process group, and `{"connect": PORT}`, which it answers with a
  connected socket, or with an error.

When the socket is closed, because the session or the agent has ended, it ends the processes of the session: SIGHUP, and
after a short time SIGKILL. All of them are its descendants, because it is a child subreaper. Uses the standard library
only, because a zygote imports this module.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import termios
import time
from typing import Any, NoReturn

from agent.cgroups import join
from agent.sandbox import Sandbox, hold, of_process
from agent.shim import descendants, isolate, process_table, reset_signals
from agent.task_setup import CANNOT_RUN, execute

MESSAGE_BYTES = 4096
_HANGUP_S = 2.0
"""Time for the processes of a session to end after SIGHUP."""
_CONNECT_S = 5.0
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def attend(launch: dict[str, Any], started: int) -> None:
    """Runs the session that `launch` describes until it ends. `started` is the socket to the agent."""
    agent = socket.socket(fileno=started)
    try:
        if launch["container_pid"] is not None:
            sandbox: Sandbox | None = of_process(launch["container_pid"])
        else:
            sandbox = None if launch["sandbox"] is None else hold(**launch["sandbox"])
        if sandbox is not None:
            sandbox.fork_inside()
    except OSError as error:
        _say(agent, error=f"the task's sandbox cannot be entered: {error}")
        return
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, waking = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    proc = "/proc" if sandbox is None else sandbox.proc
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(woken)
        signal.set_wakeup_fd(-1)
        _become_command(launch, shim, agent, sandbox)
    with contextlib.suppress(OSError):  # The agent has ended.
        status = _watch(agent, woken, pid, reads=launch["session"]["kind"] != "forward")
        _end_all(proc)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            _say(agent, exit=code if code >= 0 else 128 - code)
    _end_all(proc)
    if sandbox is not None and launch["container_pid"] is None:
        sandbox.release()


def _become_command(launch: dict[str, Any], shim: int, agent: socket.socket, sandbox: Sandbox | None) -> NoReturn:
    """Runs in the forked child: becomes a process of the task, and executes the command or opens connections."""
    try:
        os.setsid()
        join(launch["limits"])
        os.umask(0o022)
        if launch["container_pid"] is not None:
            _drop_capabilities()
        isolate(launch, shim, sandbox)
        try:
            os.chdir(launch["cwd"])
        except OSError:
            os.chdir("/")
        if launch["session"]["kind"] == "forward":
            _say(agent, started=os.getpid())
            _serve_connections(agent)
            os._exit(0)
        _give_streams(launch["session"], agent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        reset_signals()
    except BaseException as error:
        with contextlib.suppress(OSError):
            _say(agent, error=f"the command cannot be started in the task: {error}")
        os._exit(CANNOT_RUN)
    execute(launch["argv"], launch["env"])


def _drop_capabilities() -> None:
    """Drops the capabilities of programs that this process will execute, as the engine does for a container."""
    number = 0
    while _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1


def _give_streams(wanted: dict[str, Any], agent: socket.socket) -> None:
    """Gives this process a terminal or pipes, and the agent their other ends."""
    if wanted["terminal"]:
        master, terminal = os.openpty()
        set_size(master, wanted["rows"], wanted["columns"])
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        theirs, ours = [master], [terminal] * 3
    else:
        (stdin, giving), (taking, stdout), (taking_errors, stderr) = os.pipe(), os.pipe(), os.pipe()
        theirs, ours = [giving, taking, taking_errors], [stdin, stdout, stderr]
    # The agent gets them before the command writes anything.
    socket.send_fds(agent, [json.dumps({"started": os.getpid()}).encode()], theirs)
    for number, descriptor in enumerate(ours):
        os.dup2(descriptor, number)


def set_size(terminal: int, rows: int, columns: int) -> None:
    """Sets the size of a terminal. The kernel sends SIGWINCH to its foreground process group."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _serve_connections(agent: socket.socket) -> None:
    """Connects to ports of this machine as the agent asks, until it closes the socket."""
    while message := agent.recv(MESSAGE_BYTES):
        port = int(json.loads(message)["connect"])
        try:
            # The name stands for IPv4 and IPv6.
            with socket.create_connection(("localhost", port), _CONNECT_S) as connection:
                connection.setblocking(False)
                socket.send_fds(agent, [b"{}"], [connection.fileno()])
        except OSError as error:
            _say(agent, error=f"port {port}: {error.strerror or error}")


def _watch(agent: socket.socket, woken: int, pid: int, *, reads: bool) -> int | None:
    """Passes signals on until the command ends; returns its wait status. None: the agent has closed the socket.

    `reads`: this process gets the agent's messages, and not its child.
    """
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(agent.fileno(), select.POLLIN if reads else 0)  # The end of the socket is always reported.
    while True:
        ready = dict(poll.poll())
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            if (status := _reap(pid)) is not None:
                return status
        if agent.fileno() in ready:
            message = agent.recv(MESSAGE_BYTES) if reads else b""
            if not message:
                return None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, int(json.loads(message)["signal"]))


def _reap(pid: int) -> int | None:
    """Reaps all children that have ended. Returns the wait status of the command if it has ended."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == pid:
                found = status
    return found


def _end_all(proc: str) -> None:
    """Ends all processes of the session."""
    give_up_s, number = time.monotonic() + _HANGUP_S, signal.SIGHUP
    told = set[int]()
    while True:
        _reap(0)
        table = process_table(proc)
        left = {pid for pid in descendants({os.getpid()}, table) if table[pid][0] not in "ZX"}
        if not left:
            return
        if time.monotonic() > give_up_s:
            number, told = signal.SIGKILL, set()
        for pid in left - told:
            for one in (number, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, one)
        told |= left
        time.sleep(0.01)


def _say(agent: socket.socket, **message: Any) -> None:
    agent.send(json.dumps(message).encode())
