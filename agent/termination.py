"""Which processes of a task get SIGTERM, the notice to stop, and when. Each gets it at most once.

- The process that the task started gets the notice. Programs that start others, such as torchrun, srun or timeout(1),
  pass it on themselves, and trainers need their data loaders to save. So their children get nothing.
- A shell without a handler for SIGTERM passes nothing on. Its foreground command gets the notice, too, and the
  foreground command of that one, if it is a shell. If the shell has only background commands, it waits for these.
- A shell with a trap runs its handler when its foreground command ends. It gets the notice alone. If its foreground
  command still runs when half of the grace period has passed, this command gets the notice, because otherwise both
  would be killed at the deadline.
- A process whose standard input was a pipe at the notice gets it only if it still runs `LATER_S` after the last writer
  of the pipe has ended: `tee` must outlive the trainer whose output it reads. So must bash with `lastpipe`, zsh and
  ksh, which run the last command of a pipeline themselves, and afterwards the next commands of the script.
- A background command, and a process that was adopted by the shim, gets the notice only if it still runs `LATER_S`
  after all others have ended.
- If a process without a handler ends, as most launchers do, its children get the notice. If a process with a handler
  ends, its children are background commands. The notice is not sent again to a child that has probably received it
  from its parent: a child of a shell that has a handler itself, or a member of a process group that timeout(1) has
  signalled.
- A process that began after the notice never gets it: a handler may need it to save.

`recipients` is the pure rule. Uses the standard library only, because the shim imports this module.
"""

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

LATER_S = 3.0
"""How long a process that may end by itself gets no notice; at most a quarter of the grace period."""
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "ksh93", "mksh", "zsh"}
SETUP = "mizzen-setup"
"""Name of a task's first process while it waits for the setup script. It passes nothing on, like a shell."""
_SAVED_STDIN = (0, *range(10, 20))
"""Descriptors of a shell that can be the standard input of the script: 0, or those to which shells move it while they
redirect 0 for a command that they run themselves."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ObservedProcess:
    """One process, as `/proc` shows it."""

    pid: int
    start: int
    """Clock ticks since boot."""
    parent: int
    group: int
    is_shell: bool = False
    catches: bool = False
    """Whether it has a handler for SIGTERM."""
    background: bool = False
    """Whether it ignores SIGINT and SIGQUIT, as background commands of a shell without job control do."""
    reads: str | None = None
    """The pipe that is its standard input, also while a shell has redirected it for one of its commands."""
    writes: frozenset[str] = frozenset()
    """The pipes that it can write to, and that are the standard input of other processes."""


class NoticeWait(Enum):
    """How long the condition for the notice must hold before a process gets the notice."""

    NONE = "none"
    LATER = "later"
    """`LATER_S`."""
    HALF = "half"
    """Until half of the grace period has passed."""


def read_processes(pids: Iterable[int], proc: str = "/proc") -> dict[int, ObservedProcess]:
    """Returns the processes among `pids` that are alive, by pid.

    `proc` is `/proc` as the PID namespace sees it to which `pids` belong.
    """
    found = {pid: process for pid in pids if (process := _read(f"{proc}/{pid}", pid)) is not None}
    pipes = {process.reads for process in found.values()} - {None}
    if pipes:
        found = {pid: replace(process, writes=_written(f"{proc}/{pid}") & pipes) for pid, process in found.items()}
    return found


def recipients(
    known: Mapping[int, ObservedProcess], living: Mapping[int, ObservedProcess], told: set[int], first: int
) -> dict[int, NoticeWait]:
    """Returns the processes that get the notice, each with how long this result must hold before it is sent.

    Args:
        known: The processes that began before the notice, with their parents at that time.
        living: All processes of the task that are alive.
        told: Those in `known` that got the notice.
        first: The process that the task started.
    """
    return _Rule(known, living, told, first).recipients()


class _Rule:
    def __init__(
        self, known: Mapping[int, ObservedProcess], living: Mapping[int, ObservedProcess], told: set[int], first: int
    ) -> None:
        self.known, self.living, self.told, self.first = known, living, told, first
        self.found: dict[int, NoticeWait] = {}
        self.children: dict[int, list[ObservedProcess]] = {}
        for process in known.values():
            self.children.setdefault(process.parent, []).append(process)

    def recipients(self) -> dict[int, NoticeWait]:
        tops = [process for process in self.known.values() if process.parent not in self.known]
        awaited = set(self.told)
        idle = []
        while tops:
            process = tops.pop()
            tops += self.children.get(process.pid, ())
            if process.pid not in self.living or process.pid in self.told:
                continue
            wait = self._wait(process)
            if wait is None:
                idle.append(process.pid)
                continue
            awaited.add(process.pid)
            wait = self._after_writers(process, wait)
            if wait is not None:
                self.found[process.pid] = wait
        if not any(pid in self.living for pid in awaited):
            self.found |= {pid: NoticeWait.LATER for pid in idle if self._may_be_told(self.known[pid])}
        return self.found

    def _wait(self, process: ObservedProcess) -> NoticeWait | None:
        """Returns when the process gets the notice, ignoring pipes; None: not before all others have ended."""
        above = self.known.get(process.parent)
        if process.pid == self.first:
            return NoticeWait.NONE
        if above is None or not self._may_be_told(process):
            return None
        if above.is_shell:
            if not self._is_foreground(process, above):
                return None
            if above.catches:  # Its handler runs only when this command has ended.
                return NoticeWait.HALF
            stopped = above.pid not in self.living or above.pid in self.told or above.pid in self.found
            # With `lastpipe`, the shell itself reads the output of its command, and ends after it.
            return NoticeWait.NONE if stopped or above.reads in process.writes else None
        return NoticeWait.NONE if above.pid not in self.living and not above.catches else None

    def _after_writers(self, process: ObservedProcess, wait: NoticeWait) -> NoticeWait | None:
        """Returns when a process gets the notice if it reads a pipe; None: not while the pipe has a writer."""
        if process.reads is None:
            return wait
        writers = [one for one in self.living.values() if process.reads in one.writes and one.pid != process.pid]
        # A command that bash starts with `< <(...)` is itself the parent of the writer, and ends before it.
        if any(process.is_shell or not self._is_below(one, process) for one in writers):
            return None
        return NoticeWait.LATER if wait is NoticeWait.NONE and not writers else wait

    def _is_below(self, process: ObservedProcess | None, above: ObservedProcess) -> bool:
        while process is not None and process.pid != above.pid:
            process = self.known.get(process.parent, self.living.get(process.parent))
        return process is not None

    def _may_be_told(self, process: ObservedProcess) -> bool:
        """Whether the notice may be sent: no other process forwards it to this one, or has probably done so."""
        above = self.known.get(process.parent)
        if above is None:
            return True
        if above.pid in self.living and not above.is_shell:
            return False
        if above.is_shell and above.catches and not self._is_foreground(process, above):
            # If the shell had passed the notice on to a process without a handler, this would have ended.
            return above.pid not in self.living and not process.catches
        leader = self.known.get(process.group)
        return leader is None or leader.is_shell or not leader.catches or leader.pid in (process.pid, self.first)

    def _is_foreground(self, process: ObservedProcess, shell: ObservedProcess) -> bool:
        """Whether a shell waits for its child: the foreground command, with the commands whose output it reads.

        A shell that has only background commands waits for these. One with a trap then passes the notice on to them.
        """
        awaited = [one for one in self.children[shell.pid] if not one.background]
        if shell.background or not awaited:  # The commands of a shell in the background cannot be told apart.
            return not shell.catches
        read = {one.reads for one in awaited} - {None}
        return process in awaited or bool(process.writes & read)


class TaskNotice:
    """The notice to one task: the processes that got it, and when others get it."""

    def __init__(self, first: int, now_s: float) -> None:
        """`first` is the process that the task started; `now_s` is on CLOCK_BOOTTIME, as in the methods."""
        self.first = first
        self.began_s = now_s
        self.known: dict[int, ObservedProcess] = {}
        self.told: set[int] = set()
        self.noticed = False
        """Whether a process got the notice before the task's first process ended."""
        self._caught: set[int] = set()
        """Processes that have had a handler for SIGTERM. Python removes its handlers while it exits."""
        self._since_s: dict[int, float] = {}

    def due(self, living: Mapping[int, ObservedProcess], now_s: float, deadline_s: float) -> list[int]:
        """Returns the pids of the processes that get the notice now, parents before children, and records them."""
        for pid, process in living.items():
            before = self.known.get(pid)
            if before is None and process.start <= self.began_s * _TICKS_PER_S:
                self.known[pid] = process
            elif before is not None and before.start == process.start and pid not in self.told:
                # A shell that has read a pipeline to its end gets its old standard input back, or reads the next one.
                self.known[pid] = replace(process, parent=before.parent, reads=before.reads or process.reads)
        alive = {pid: one for pid, one in living.items() if pid not in self.known or self.known[pid].start == one.start}
        self._caught |= {pid for pid, one in self.known.items() if one.catches}
        found = recipients(self.known, alive, self.told, self.first)
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in found}
        grace_s = max(0.0, deadline_s - self.began_s)
        wait_s = {NoticeWait.NONE: 0.0, NoticeWait.LATER: min(LATER_S, grace_s / 4), NoticeWait.HALF: 0.0}
        due = [
            pid
            for pid, wait in found.items()
            if now_s - self._since_s[pid] >= wait_s[wait]
            and (wait is not NoticeWait.HALF or now_s >= self.began_s + grace_s / 2)
        ]
        self.told |= set(due)
        self.noticed |= bool(due) and self.first in alive
        return due

    def status(self, own: int, ended: Mapping[int, int]) -> int:
        """Returns the task's wait status: if the notice ended a shell, the status of the command below it that saved.

        `own` is the wait status of the task's first process. `ended` has those of the processes that the shim reaped
        after the notice, by pid.
        """
        first = self.known.get(self.first)
        if not _by_notice(own) or first is None or not first.is_shell or self.first not in self.told:
            return own
        commands = [
            pid for pid in ended
            if pid != self.first and (one := self.known.get(pid)) is not None
            and (pid in self._caught or not one.is_shell)
        ]  # fmt: skip
        if not commands:
            return own

        def counts(pid: int) -> tuple[bool, ...]:
            status = ended[pid]
            return pid in self._caught, not _by_notice(status), pid in self.told, status != 0

        return ended[max(commands, key=counts)]


def _by_notice(status: int) -> bool:
    """Whether a wait status means that SIGTERM ended the process, or a command of the shell."""
    return os.waitstatus_to_exitcode(status) in (-signal.SIGTERM, 128 + signal.SIGTERM)


def _read(folder: str, pid: int) -> ObservedProcess | None:
    try:
        with open(f"{folder}/stat", "rb") as file:
            text = file.read()
        with open(f"{folder}/status", "rb") as file:
            status = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()
    if fields[0] in b"ZX":
        return None
    comm = text.partition(b"(")[2].rpartition(b")")[0].decode(errors="replace")
    caught, ignored = int(status.get(b"SigCgt", b"0"), 16), int(status.get(b"SigIgn", b"0"), 16)
    is_shell = comm == SETUP or _program(folder, comm) in _SHELLS
    return ObservedProcess(
        pid=pid,
        start=int(fields[19]),
        parent=int(fields[1]),
        group=int(fields[2]),
        is_shell=is_shell,
        catches=_has(caught, signal.SIGTERM),
        background=_has(ignored, signal.SIGINT) and _has(ignored, signal.SIGQUIT),
        reads=next((pipe for number in (_SAVED_STDIN if is_shell else (0,)) if (pipe := _pipe(folder, number))), None),
    )


def _program(folder: str, comm: str) -> str:
    """Returns the program name of a process. For a script it is the script's name, not the interpreter's."""
    try:
        name = os.path.basename(os.readlink(f"{folder}/exe")).removesuffix(" (deleted)")
    except OSError:
        return comm
    return comm if name == "busybox" else name


def _has(signals: int, number: int) -> bool:
    return bool(signals >> number - 1 & 1)


def _pipe(folder: str, number: int) -> str | None:
    """Returns the pipe that a process reads through a descriptor, or None."""
    try:
        path = f"{folder}/fd/{number}"
        return _name(os.readlink(path), read=True) if os.lstat(path).st_mode & 0o400 else None
    except OSError:
        return None  # It is not open, or the process has ended or belongs to another user.


def _written(folder: str) -> frozenset[str]:
    """Returns the pipes to which a process can write."""
    found = set()
    try:
        for name in os.listdir(f"{folder}/fd"):
            path = f"{folder}/fd/{name}"
            if os.lstat(path).st_mode & 0o200 and (pipe := _name(os.readlink(path), read=False)):
                found.add(pipe)
    except OSError:
        pass  # The process has ended, or belongs to another user.
    return frozenset(found)


def _name(target: str, *, read: bool) -> str | None:
    """Returns the name of the pipe that `target`, an entry of `/proc/PID/fd`, is an end of; None: it is no pipe.

    The pipes of ksh93 are pairs of sockets. The kernel numbers both consecutively, and ksh93 reads the first.
    """
    kind, _, number = target.rstrip("]").partition(":[")
    if kind == "socket":
        return f"socket:[{int(number) + (0 if read else -1)}]"
    return target if kind == "pipe" else None
