"""The command `get`."""

from collections.abc import Sequence
from pathlib import Path

import click

from mizzen.cli.printer import Column, emit_list
from mizzen_client.cli import formats
from mizzen_client.cli.session import WORKLOAD, OutputCommand, Session, say
from mizzen_client.errors import OutputError
from mizzen_client.views import Output

_COLUMNS = (
    Column("NAME", lambda o: o["name"]),
    Column("TASK", lambda o: f"{o['job']}/{o['task']}"),
    Column("ATTEMPT", lambda o: o["attempt"], right=True),
    Column("SIZE", lambda o: None if o["error"] else formats.size(o["size_bytes"]), right=True),
    Column("FILES", lambda o: None if o["error"] else o["files"], right=True),
    Column("STORED", lambda o: formats.clock(o["stored_at"])),
    Column("NOTE", lambda o: note_of(o), flexible=True),
)


def note_of(output: Output) -> str:
    """Return why an output, or a part of it, was not stored; empty if all of it was stored."""
    if output["error"]:
        return f"not stored: {output['error']}"
    if not output["left_out_count"]:
        return ""
    more = output["left_out_count"] - len(output["left_out"])
    return f"without {'; '.join(output['left_out'])}{f'; and {more} more' if more else ''}"


def newest(outputs: Sequence[Output]) -> list[Output]:
    """Return the outputs of the newest attempt of each task that has stored them; if none has, those with errors."""
    found: dict[tuple[str, str, int], Output] = {}
    for one in sorted(outputs, key=lambda one: (one["error"] is None, one["attempt"])):
        found[one["name"], one["job"], one["task"]] = one
    return [found[place] for place in sorted(found)]


@click.command(cls=OutputCommand)
@WORKLOAD
@click.argument("name", required=False)
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    help="The folder that gets the files; it must be new or empty. Default: the name of the output.",
)
@click.option("--job", help="Fetch only outputs of tasks of this job.")
@click.option("--task", type=click.IntRange(min=0), help="Fetch only outputs of the task with this index.")
@click.option("--attempt", type=click.IntRange(min=1), help="Fetch only outputs of this attempt.")
@click.pass_obj
def get(
    session: Session,
    workload: str,
    name: str | None,
    folder: Path | None,
    job: str | None,
    task: int | None,
    attempt: int | None,
) -> None:
    """Fetch an output of a workload, or list its outputs.

    Outputs are the files in `outputs` of its document. Without NAME, they are listed. If several tasks have stored an
    output, the files of each are in a folder JOB.TASK. The newest attempt of a task counts.
    """
    id_ = session.resolve(workload)
    found = [
        one
        for one in session.client.outputs(id_, name, job, task)
        if attempt is None or one["attempt"] == attempt
    ]  # fmt: skip
    chosen = newest(found)
    if name is None:
        emit_list(session, chosen, _COLUMNS)
        return
    if not chosen:
        raise OutputError(_why_none(session, id_, name))
    wanted = [one for one in chosen if one["error"] is None] or chosen
    to = folder or Path(name)
    for one in wanted:
        own = to / f"{one['job']}.{one['task']}" if len(wanted) > 1 else to
        session.client.fetch_output(id_, one, own)
        say(f"{own}: {formats.size(one['size_bytes'])} of {one['job']}/{one['task']}, attempt {one['attempt']}")
        if note := note_of(one):
            say(f"{own}: {note}")
    _say_failed(found, wanted)


def _say_failed(found: Sequence[Output], wanted: Sequence[Output]) -> None:
    """Print which later attempts have not stored the fetched output."""
    at = {(one["job"], one["task"]): one["attempt"] for one in wanted}
    for one in found:
        place = (one["job"], one["task"])
        if one["error"] and one["attempt"] > at.get(place, 0):
            say(f"attempt {one['attempt']} of {one['job']}/{one['task']}: {note_of(one)}")


def _why_none(session: Session, id_: str, name: str) -> str:
    workload = session.client.workload(id_)
    declared = workload["spec"].get("outputs", {})
    if workload["array"]:
        return f"{id_} is an array: give one of its elements, such as {workload['name']}/INDEX"
    if name not in declared:
        have = f"has the outputs {', '.join(sorted(declared))}" if declared else "has no `outputs` in its document"
        return f"{id_} has no output {name}: it {have}"
    if not workload["attempt"] or not workload["finished_at"]:
        return f"output {name} of {id_} is not stored yet: it is stored when a task has ended or was stopped"
    return f"output {name} of {id_} was not stored: no task has stored {declared[name]} (`mizzen show {id_}`)"
