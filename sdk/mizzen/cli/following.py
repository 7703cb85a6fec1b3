"""Commands that follow what happens: logs and events."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from mizzen.cli import words
from mizzen.cli.output import cell, dump_line, emit_stream
from mizzen.cli.session import WORKLOAD, Command, Session, complete_workload, interrupted, say
from mizzen.client.views import Event


@click.command(cls=Command)
@WORKLOAD
@click.option("-f", "--follow", is_flag=True, help="Go on until the workload has ended.")
@click.option("-n", "--tail", type=click.IntRange(min=0), help="Only the last lines of each task.")
@click.option("--job", help="Only this job's tasks.")
@click.option("--task", type=click.IntRange(min=0), help="Only the task with this index.")
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt; the newest by default.")
@click.pass_obj
def logs(
    session: Session,
    workload: str,
    follow: bool,
    tail: int | None,
    job: str | None,
    task: int | None,
    attempt: int | None,
) -> None:
    """Print what a workload's tasks wrote. With several tasks each line starts with `job/task| `.

    At a terminal control characters are shown and not obeyed (`^[` for an escape); pipes get the bytes as they are:
    `mizzen logs ... | less -R` shows colours.
    """
    id_ = session.resolve(workload)
    try:
        print_logs(session, id_, follow=follow, tail=tail, job=job, task=task, attempt=attempt)
    except KeyboardInterrupt:
        interrupted(f"{id_} goes on; `mizzen logs -f {id_}` follows it again")


def print_logs(session: Session, workload_id: str, **options: Any) -> None:
    """Print lines as they come; as JSON or YAML, an object for each.

    At a terminal, what tasks wrote must not command it: controls are shown (`^[`). A pipe or a file gets the bytes.
    If the workload is queued, stderr says why there are none yet, or no further ones for now.
    """
    workload = session.client.workload(workload_id)
    if workload["queued"] or not workload["attempt"]:
        say(f"{workload_id} is {session.client.why(workload_id)['summary']}")
    out = sys.stdout.buffer
    is_terminal = sys.stdout.isatty()
    for line in session.client.logs(workload_id, on_attempt=_say_attempt, **options):
        if session.output in ("json", "yaml"):
            body = dump_line({"line": line.decode("utf-8", "replace")})
            out.write(f"{'--- ' if session.output == 'yaml' else ''}{body}\n".encode())
        elif is_terminal:
            out.write(words.visible(line.decode("utf-8", "replace").removesuffix("\r")).encode() + b"\n")
        else:
            out.write(line + b"\n")
        out.flush()


def _say_attempt(number: int) -> None:
    say(f"attempt {number}")


@click.command(cls=Command)
@click.argument("workload", required=False, shell_complete=complete_workload)
@click.option("-f", "--follow", is_flag=True, help="Go on as they happen.")
@click.option("--after", metavar="ID", help="Only those after this event; `now`: only those to come.")
@click.pass_obj
def events(session: Session, workload: str | None, follow: bool, after: str | None) -> None:
    """Print what happened to a workload, or to all that the key may see."""
    id_ = session.resolve(workload) if workload else None
    last = after

    def found() -> Iterator[Event]:
        nonlocal last
        for event in session.client.events(id_, follow=follow, after=after):
            last = event["id"]
            yield event

    try:
        emit_stream(session, found(), _line, name=lambda event: str(event["id"]))
    except KeyboardInterrupt:
        again = " ".join(filter(None, ["mizzen events -f", id_, f"--after {last}" if last else None]))
        interrupted(f"nothing but this list has ended; `{again}` goes on")


def _line(event: Mapping[str, Any]) -> str:
    about = event["workload"] or event["machine"] or event["region"]
    attempt = f"#{event['attempt']}" if event["attempt"] else ""
    what = words.reason(event["reason"]) or words.pairs(event["detail"])
    return f"{words.clock(event['at'])}  {event['kind']:<24}  {cell(about)}{attempt}  {cell(what)}".rstrip()
