"""The commands `logs` and `events`."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import Any

import click

from mizzen.cli.printer import cell, dump_line, emit_stream
from mizzen.cli.values import BadValue, seconds
from mizzen_client.cli import formats
from mizzen_client.cli.session import WORKLOAD, OutputCommand, Session, complete_workload, interrupted, say
from mizzen_client.errors import ClientError
from mizzen_client.views import Event as EventView
from mizzen_client.views import Why

_WAITS = ("pending", "preempted")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
"""Between two looks at why a workload waits."""


def _time(context: click.Context, parameter: click.Parameter, text: str | None) -> datetime | None:
    """Option callback: convert a time, or a duration before now."""
    if text is None:
        return None
    try:
        return datetime.now(UTC) - timedelta(seconds=seconds(text, above_zero=False))
    except (BadValue, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        right = "a duration such as 10m, or a time such as 2026-11-28T08:00 (local) or 2026-11-28T08:00+01:00"
        raise click.BadParameter(f"{text!r} must be {right}", context, parameter) from None


def _pattern(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Option callback: check a regular expression."""
    try:
        re.compile(text or "")
    except re.error as error:
        raise click.BadParameter(f"{text!r} is not a regular expression: {error}", context, parameter) from None
    return text


@click.command(cls=OutputCommand)
@WORKLOAD
@click.option("-f", "--follow", is_flag=True, help="Continue until the workload has ended.")
@click.option("--since", metavar="TIME", callback=_time, help="Print only lines after this time, or of the last `10m`.")
@click.option("--grep", metavar="PATTERN", callback=_pattern, help="Print only lines that match (Python's `re`).")
@click.option("-n", "--tail", type=click.IntRange(min=0), help="Print only the last lines of each task.")
@click.option("--stdout", "stream", flag_value="stdout", help="Print only stdout, of jobs with `output: separate`.")
@click.option("--stderr", "stream", flag_value="stderr", help="Print only stderr, of jobs with `output: separate`.")
@click.option("--job", help="Print only the tasks of this job.")
@click.option("--task", type=click.IntRange(min=0), help="Print only the task with this index.")
@click.option("--attempt", type=click.IntRange(min=1), help="Print the logs of this attempt. Default: the newest.")
@click.pass_obj
def logs(session: Session, /, workload: str, **options: Any) -> None:
    """Print the output of a workload's tasks. If there are several tasks, each line starts with `job/task| `.

    Of an array, the output of all elements is printed, in the order of the indexes, and each line starts with
    `name/index: `. --tail counts the lines that --grep selects.

    On a terminal, control characters are printed as visible text (`^[` for an escape). A pipe receives the unchanged
    bytes: `mizzen logs ... | less -R` shows colours.
    """
    id_ = session.resolve(workload)
    try:
        print_logs(session, id_, output=options.pop("stream"), **options)
    except KeyboardInterrupt:
        interrupted(f"{id_} continues; `mizzen logs -f {id_}` follows it again")


def print_logs(session: Session, workload_id: str, prefix: str = "", **options: Any) -> None:
    """Print log lines as they arrive, each after `prefix`; with `-o json` or `-o yaml`, one object per line.

    On a terminal, control characters are printed as visible text (`^[`), so that the output of tasks cannot control the
    terminal. A pipe or a file receives the unchanged bytes. If the workload is queued or has no attempt, its status is
    printed to stderr, because no lines arrive for now; with `follow`, another time if the reason changes.
    """
    workload = session.client.workload(workload_id)
    array = workload["array"]
    if (array["waiting"] == array["elements"]) if array else (workload["queued"] or not workload["attempt"]):
        why = session.client.why(workload_id)
        say(f"{workload_id} is {why['summary']}")
        with _saying_changes(session, why) if options.get("follow") else nullcontext():
            _print_lines(session, workload_id, prefix, options)
    else:
        _print_lines(session, workload_id, prefix, options)


@contextmanager
def _saying_changes(session: Session, why: Why) -> Iterator[None]:
    """Print why a workload waits whenever that has changed, at growing intervals. `why`: what was printed before."""
    over = Event()

    def tell() -> None:
        said, pause_s = why, _FIRST_PAUSE_S
        while said["phase"] in _WAITS and not over.wait(pause_s):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            # The reader of the log lines waits for the API, or fails, or has ended and closed the connection.
            with suppress(ClientError, RuntimeError):
                found = session.client.why(why["workload"])
                if found["phase"] in _WAITS and not over.is_set() and _codes(found) != _codes(said):
                    say(f"{why['workload']} is {found['summary']}")
                said = found

    Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _codes(why: Why) -> set[str]:
    return {reason["code"] for reason in why["reasons"]}


def _print_lines(session: Session, workload_id: str, prefix: str, options: dict[str, Any]) -> None:
    out = sys.stdout.buffer
    is_terminal = sys.stdout.isatty()
    for line in session.client.logs(workload_id, on_attempt=_say_attempt, **options):
        line = prefix.encode() + line
        if session.output in ("json", "yaml"):
            body = dump_line({"line": line.decode("utf-8", "replace")})
            out.write(f"{'--- ' if session.output == 'yaml' else ''}{body}\n".encode())
        elif is_terminal:
            out.write(formats.visible(line.decode("utf-8", "replace").removesuffix("\r")).encode() + b"\n")
        else:
            out.write(line + b"\n")
        out.flush()


def _say_attempt(number: int) -> None:
    say(f"attempt {number}")


@click.command(cls=OutputCommand)
@click.argument("workload", required=False, shell_complete=complete_workload)
@click.option("-f", "--follow", is_flag=True, help="Continue with new events as they occur.")
@click.option("--after", metavar="ID", help="Print only the events after this one; `now`: only future events.")
@click.pass_obj
def events(session: Session, workload: str | None, follow: bool, after: str | None) -> None:
    """Print the events of a workload, or all events that the API key may see."""
    id_ = session.resolve(workload) if workload else None
    last = after

    def found() -> Iterator[EventView]:
        nonlocal last
        for event in session.client.events(id_, follow=follow, after=after):
            last = event["id"]
            yield event

    try:
        emit_stream(session, found(), _line, name=lambda event: str(event["id"]))
    except KeyboardInterrupt:
        again = " ".join(filter(None, ["mizzen events -f", id_, f"--after {last}" if last else None]))
        interrupted(f"only this listing has stopped; `{again}` continues it")


def _line(event: Mapping[str, Any]) -> str:
    about = event["workload"] or event["machine"] or event["region"]
    attempt = f"#{event['attempt']}" if event["attempt"] else ""
    what = formats.reason(event["reason"]) or formats.pairs(event["detail"])
    return f"{formats.clock(event['at'])}  {event['kind']:<24}  {cell(about)}{attempt}  {cell(what)}".rstrip()
