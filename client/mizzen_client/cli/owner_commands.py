"""The commands of a machine's owner: `reclaim`, `lend` and `lending`.

They talk to the agent of this machine through a local socket, so they work while the rest of the installation is down.
"""

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mizzen.cli.exits import Exit
from mizzen.cli.parser import Parser
from mizzen.cli.printer import Column, emit_one, say, table
from mizzen.cli.values import BadValue, Failure, UsageError, duration
from mizzen_client.cli import formats

_PLACES = ("/run/mizzen/owner.sock", "mizzen-agent/owner.sock")
_EMBEDDED = "mizzen-data/machines/*/owner.sock"
"""The sockets of the machines of `mizzen up` with the default data folder."""
_ANSWER_S = 30.0
_FIRST_S = 3.0
"""How long a reclaim waits for the first answer, which the agent sends before it acts."""
_LEAVES = {
    "admitted": "leaves in time",
    "squeezed": "may be late",
    "no_time": "too late",
    "too_narrow": "too large",
    "crowded": "no bandwidth left",
}
"""Texts about the checkpoint of a workload that must leave within a notice."""


def _gpus(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise BadValue(f"{text!r} must be GPU numbers such as 0 or 0,1")
    return found


def _path(given: Namespace) -> Path:
    named = given.socket or os.environ.get("MIZZEN_OWNER_SOCKET")
    if named:
        return Path(named)
    found = next((Path(place) for place in _PLACES if Path(place).exists() or Path(f"{place}.json").exists()), None)
    if found is None:
        places = " or ".join(_PLACES)
        embedded = sorted(map(str, Path().glob(_EMBEDDED)))
        hint = f"; `mizzen up` in this folder has {', '.join(embedded[:3])}" if embedded else ""
        raise Failure(
            Exit.NOT_FOUND, f"no agent with an owner was found at {places}; name its socket with --socket{hint}"
        )
    return found


def _ask(path: Path, request: Mapping[str, Any], first_s: float = _ANSWER_S) -> Iterator[dict[str, Any]]:
    """Send a request to the agent, and yield each status that it answers with. It must answer within `first_s`.

    Raises:
        Failure: the agent does not answer, or refuses.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(first_s)
    with connection:
        try:
            folder = os.open(path.parent, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
            try:
                connection.connect(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as lines:
                for status in _statuses(_heard(connection, lines)):
                    if status is None:
                        return
                    yield status
        except FileNotFoundError:
            raise Failure(Exit.NOT_FOUND, f"socket {path}: does not exist; the machine's agent makes it") from None
        except PermissionError:
            raise Failure(Exit.REFUSED, f"socket {path}: only the owner of the machine may use it") from None
        except ConnectionRefusedError:
            raise Failure(
                Exit.UNAVAILABLE,
                f"socket {path}: no agent runs there. No new work starts without it, but running tasks continue",
            ) from None
        except (OSError, ValueError) as error:
            raise Failure(Exit.UNAVAILABLE, f"socket {path}: the agent does not answer: {error}") from None
    raise Failure(
        Exit.UNAVAILABLE, f"socket {path}: the agent ended before it had answered; a reclaim that it began is completed"
    )


def _heard(connection: socket.socket, lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a response. After the first line, each line may take longer."""
    for line in lines:
        connection.settimeout(_ANSWER_S)
        yield line


def _statuses(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield each status of an answer, and None at its end.

    Raises:
        Failure: the answer is an error.
    """
    for line in lines:
        answer = json.loads(line)
        if "error" in answer:
            raise Failure(_code(answer["error"]), answer["error"])
        if "heard" in answer:
            continue
        yield None if "done" in answer else answer["status"]


def _take(path: Path, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Like `_ask`, for a reclaim. If the agent does not answer, the tasks are stopped without it.

    Raises:
        Failure: the request is refused, or this user can stop no tasks.
    """
    try:
        yield from _ask(path, request, _FIRST_S)
        return
    except Failure as failure:
        if failure.code not in (Exit.UNAVAILABLE, Exit.NOT_FOUND):
            raise
        known = _agent_at(path, failure)
    say("the agent does not answer; this command stops the tasks itself")
    command = [known["python"], "-P", "-m", "agent.lending.emergency_reclaim", known["state_dir"], json.dumps(request)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        for status in _statuses(process.stdout):
            if status is None:
                return
            yield status
    raise Failure(Exit.UNAVAILABLE, f"{' '.join(command[:4])}: ended with {process.returncode} before it had answered")


def _agent_at(path: Path, failure: Failure) -> dict[str, str]:
    """Return the state folder and the Python of the agent behind a socket, from the file that it wrote beside it.

    Raises:
        Failure: the file does not exist, or this user may not use it; the message is `failure` with advice.
    """
    beside = path.with_name(f"{path.name}.json")
    try:
        with beside.open("rb") as file:
            about = os.fstat(file.fileno())
            found: dict[str, str] = json.load(file)
    except PermissionError:
        raise Failure(failure.code, f"{failure}. As root, this command stops the tasks itself") from None
    except (OSError, ValueError):
        raise failure from None
    # It names a program that is run: no other user may have written it.
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022:
        raise Failure(Exit.REFUSED, f"{beside}: must belong to root or to you, and no one else may write it")
    return found


def _code(error: str) -> Exit:
    return Exit.REFUSED if "is not the owner" in error else Exit.USAGE


def _reclaim(given: Namespace) -> int:
    if given.now and given.notice_s is not None:
        raise UsageError("'--now' and '--notice': give one of them")
    if not given.now and given.notice_s is None:
        raise UsageError("'--now' or '--notice DURATION': give one of them")
    request = {"command": "reclaim", "gpus": given.gpus, "notice_s": given.notice_s or 0.0}
    status: dict[str, Any] = {}
    told = ""
    try:
        for status in _take(_path(given), request):
            line = _progress(status)
            if line != told and not status["free"]:
                say(line)
            told = line
    except KeyboardInterrupt:
        say("the reclaim continues; `mizzen lending` shows it, `mizzen lend` ends it")
        raise
    emit_one(given, status, lambda: _page(status), name=status["machine"])
    return Exit.OK if status["free"] else Exit.CONFLICT


def _lend(given: Namespace) -> int:
    return _show(given, {"command": "lend", "gpus": given.gpus, "hours": given.hours})


def _lending(given: Namespace) -> int:
    return _show(given, {"command": "status"})


def _show(given: Namespace, request: Mapping[str, Any]) -> int:
    *_, status = _ask(_path(given), request)
    emit_one(given, status, lambda: _page(status), name=status["machine"])
    return Exit.OK


def _progress(status: Mapping[str, Any]) -> str:
    count = sum(one["tasks"] for one in status["running"])
    free = formats.duration(status["free_in_s"])
    return f"{count} task{'' if count == 1 else 's'} to stop; free in {free} at the latest"


def _page(status: Mapping[str, Any]) -> str:
    lines = [
        _headline(status),
        f"hours: {status['hours'] or 'always'}",
        f"given: {status['given_gpu_h']:.1f} GPU hours",
    ]
    for problem in (status["problem"], status["gpus_unknown"]):
        if problem:
            lines.append(f"problem: {problem}")
    if status["isolation"] != "sandbox":
        lines.append("tasks run without a sandbox: their files in /tmp, /var/tmp and /dev/shm stay")
    if status["gpu_holders"]:
        lines.append(f"processes that hold GPUs: {', '.join(map(str, status['gpu_holders']))}")
    for gpu, used_bytes in status["gpu_used_bytes"].items():
        lines.append(f"GPU {gpu}: {formats.size(used_bytes)} of its memory are in use")
    if not status["running"]:
        return "\n".join([*lines, "no task runs"])
    columns = [
        Column("WORKLOAD", lambda one: one["name"] or one["workload"], flexible=True),
        Column("TENANT", lambda one: one["tenant"]),
        Column("GPUS", lambda one: ",".join(map(str, one["gpus"]))),
        Column("TASKS", lambda one: one["tasks"], right=True),
        Column(
            "FOR", lambda one: None if one["since_s"] is None else formats.duration(status["now_s"] - one["since_s"])
        ),
        Column("FREE IN", lambda one: formats.duration(one["ends_in_s"])),
        Column("CHECKPOINT", lambda one: _LEAVES.get(one["checkpoint"], one["checkpoint"]), drop=1),
    ]
    width = os.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join([*lines, "", *table(status["running"], columns, width)])


def _headline(status: Mapping[str, Any]) -> str:
    machine, now_s = status["machine"], status["now_s"]
    if not status["lent"]:
        left_s = status["machine_at_s"] - now_s
        until = "until its hours begin" if status["by_hours"] else "until `mizzen lend`"
        if status["by_hours"] and status["opens_at_s"] is not None:
            until = f"until its hours begin, {datetime.fromtimestamp(status['opens_at_s']):%a %H:%M}"
        if left_s > 0 and not status["free"]:
            return f"{machine} is yours in {formats.duration(left_s)} at the latest, {until}"
        what = "and free" if status["free"] else "but not free yet"
        return f"{machine} is yours, {what}, {until}"
    if status["gpus_at_s"]:
        gpus = ", ".join(status["gpus_at_s"])
        free = " and free" if status["free"] else f", free in {formats.duration(status['free_in_s'])} at the latest"
        return f"{machine} is lent, except GPU {gpus}: yours{free}"
    return f"{machine} is lent"


def reclaim() -> Parser:
    """Return the parser of `mizzen reclaim`."""
    parser = Parser(
        prog="mizzen reclaim",
        description="""\
Take this machine back from mizzen, at once or with a notice.

For its owner. No new work starts on it until `mizzen lend`, also after a restart of the machine. With a notice, tasks
first save, and leave for other machines; whatever runs at its end is killed. The command ends when no task runs any
more.

    mizzen reclaim --now
    mizzen reclaim --notice 5m --gpus 0,1""",
    )
    parser.add_argument("--now", action="store_true", help="Kill the tasks at once.")
    parser.add_argument(
        "--notice", dest="notice_s", type=duration(above_zero=True), metavar="DURATION",
        help="How long the tasks may stay.",
    )  # fmt: skip
    return _of_owner(parser, gpus=True).runs(_reclaim)


def lend() -> Parser:
    """Return the parser of `mizzen lend`."""
    parser = Parser(
        prog="mizzen lend",
        description="""\
Lend this machine to mizzen again, always or at certain hours.

For its owner. Tasks get a notice of five minutes before the hours end. `--hours always` removes them.

    mizzen lend
    mizzen lend --hours "20:00-08:00 mon-fri; 00:00-24:00 sat-sun"
    mizzen lend --gpus 2,3""",
    )
    parser.add_argument("--hours", metavar="HOURS", help="When the machine is lent, in its local time.")
    return _of_owner(parser, gpus=True).runs(_lend)


def lending() -> Parser:
    """Return the parser of `mizzen lending`."""
    parser = Parser(
        prog="mizzen lending",
        description="""\
Show what this machine lends, and what runs on it.

For each workload: for whom it runs, since when, and how long until its GPUs are free.

    mizzen lending""",
    )
    return _of_owner(parser, gpus=False).runs(_lending)


def _of_owner(parser: Parser, *, gpus: bool) -> Parser:
    """Add the options that the owner's commands share."""
    if gpus:
        numbers = "GPU numbers such as 0,1. Default: the whole machine."
        parser.add_argument("--gpus", type=_gpus, metavar="NUMBERS", help=numbers)
    places = f"Default: MIZZEN_OWNER_SOCKET, or the first of {', '.join(_PLACES)}."
    parser.add_argument("--socket", metavar="PATH", help=f"The owner's socket of the machine's agent. {places}")
    return parser
