"""Commands that show the queue and workloads, and that change workloads."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from mizzen.cli.printer import Column, emit_list, emit_one, no_colour, table
from mizzen_client.cli import formats
from mizzen_client.cli.output_commands import newest
from mizzen_client.cli.pages import show_page, why_page
from mizzen_client.cli.screen import interval_option, is_live, watch_option, watch_screen
from mizzen_client.cli.service_commands import why_service
from mizzen_client.cli.session import (
    WORKLOAD,
    WORKLOADS,
    OutputCommand,
    Session,
    complete_name,
    complete_phase,
    complete_tenant,
    complete_workload,
    finish,
    label_option,
    limit_option,
    say,
)
from mizzen_client.errors import NotFound, Unavailable, UnknownReference
from mizzen_client.views import TERMINAL_PHASES


def _step(workload: Mapping[str, Any]) -> object:
    return (workload["progress"] or {}).get("step")


def _name(workload: Mapping[str, Any]) -> str:
    element = workload["element"]
    return f"{workload['name']}/{element['index']}" if element else str(workload["name"])


def phase_of(workload: Mapping[str, Any]) -> str:
    """Return the phase; of an array also how many of its elements have ended: `running 812/1000, 3 failed`."""
    phase = str(workload["phase"])
    if workload["held_by"] and workload["queued"]:
        phase = "held"
    elif workload.get("blocked"):
        phase = "blocked"
    array = workload["array"]
    if array is None:
        return phase
    ended = array["elements"] - array["waiting"] - array["live"]
    failed = f", {array['failed']} failed" if array["failed"] else ""
    return f"{phase} {ended}/{array['elements']}{failed}"


WORKLOAD_COLUMNS = (
    Column("ID", lambda w: w["id"]),
    Column("NAME", _name, flexible=True),
    Column("TENANT", lambda w: w["tenant"], drop=2, flexible=True),
    Column("PHASE", phase_of),
    Column("REGION", lambda w: w["region"], drop=3),
    Column("STEP", _step, drop=5, right=True),
    Column("PREEMPTED", lambda w: w["preemptions"], drop=6, right=True),
    Column("AGE", lambda w: formats.between(w["submitted_at"], None), drop=1, right=True),
    Column("LEVEL", lambda w: w["level"], drop=4, right=True),
    Column("ATTEMPT", lambda w: w["attempt"], wide=True, right=True),
    Column("START", lambda w: formats.ahead(w.get("expected_start")), wide=True),
    Column("LABELS", lambda w: formats.pairs(w["labels"]), wide=True),
    Column("REASON", lambda w: formats.reason(w["reason"]), wide=True),
)
_QUEUE_COLUMNS = (
    Column("RANK", lambda q: "over" if q["over_quota"] else q["rank"], right=True),
    Column("CREDIT", lambda q: None if q["credit"] is None else f"{q['credit']:.2f}", drop=2, right=True),
    Column("ID", lambda q: q["id"]),
    Column("NAME", lambda q: q["name"], drop=1, flexible=True),
    Column("TENANT", lambda q: q["tenant"], drop=3, flexible=True),
    Column("WAITING", lambda q: formats.duration(q["waited_s"]), drop=4, right=True),
    Column("REASONS", lambda q: "; ".join(map(str, map(formats.reason, q["reasons"]))), drop=5, flexible=True),
)
_CANCEL_S = 2.0
"""The time that `cancel` waits for its workloads to end before it prints them. Workloads without slots end at once."""
_POLL_S = 0.2
_SHOWN_FAILED = 10
"""Maximum number of failed array elements that `show` lists."""


@click.command(cls=OutputCommand)
@click.option("--tenant", shell_complete=complete_tenant, help="List only the workloads of this tenant.")
@click.option(
    "--phase",
    "phases",
    multiple=True,
    shell_complete=complete_phase,
    help="List only the workloads in this phase; also `held`, `blocked` or `live` (repeatable).",
)
@click.option("--live", is_flag=True, help="List only the workloads that have not ended.")
@label_option("List only the workloads with this label")
@click.option("--name", shell_complete=complete_name, help="List only the workloads with this name.")
@click.option("--array", shell_complete=complete_workload, help="List the elements of this array that have started.")
@limit_option("workloads to list; 0: all", least=0)
@watch_option
@interval_option
@click.pass_obj
def ls(
    session: Session,
    *,
    tenant: str | None,
    phases: tuple[str, ...],
    live: bool,
    labels_: dict[str, str],
    name: str | None,
    array: str | None,
    limit: int,
    watch: bool,
    interval_s: float,
) -> None:
    """List workloads, newest first."""
    if live and phases:
        raise click.UsageError("--live and --phase cannot be used together")
    if live:
        phases = ("live",)
    head = session.resolve(array) if array else None
    one_more = limit + 1 if limit else None

    def read() -> list[Any]:
        return list(
            session.client.workloads(
                tenant=tenant, phases=phases, labels=labels_, name=name, array=head, limit=one_more
            )
        )

    if watch and is_live(session):
        watch_screen(session, read, lambda found, width: workload_lines(session, found, width), interval_s)
        return
    found = read()
    emit_list(session, found[:limit] if limit else found, WORKLOAD_COLUMNS)
    if limit and len(found) > limit:
        say(f"there are more than {limit} workloads; `--limit 0` lists all")


def workload_lines(session: Session, found: list[Any], width: int | None) -> list[str]:
    """Return the lines of the table of workloads, `width` columns wide (None: as wide as needed)."""
    columns = [column for column in WORKLOAD_COLUMNS if session.output == "wide" or not column.wide]
    return table(found, columns, width, colour=not no_colour()) if found else ["no items found"]


@click.command(cls=OutputCommand)
@WORKLOAD
@click.pass_obj
def show(session: Session, workload: str) -> None:
    """Show one workload with its attempts, or an array with the elements that failed. NAME/INDEX is an element."""
    id_ = session.resolve(workload)
    found = session.client.workload(id_)
    body: dict[str, Any] = {**found, "attempts": session.client.attempts(id_) if found["attempt"] else []}
    if found["spec"].get("outputs") and found["attempt"] and not found["array"]:
        with contextlib.suppress(Unavailable, NotFound):  # Its bucket does not answer, or they were deleted.
            body["outputs"] = newest(session.client.outputs(id_))
    if found["array"]:
        failed = session.client.workloads(array=id_, phases=("failed",), limit=_SHOWN_FAILED)
        body["failed"] = list(failed)
    emit_one(session, body, lambda: show_page(body))


@click.command(cls=OutputCommand)
@WORKLOAD
@click.pass_obj
def why(session: Session, workload: str) -> None:
    """Explain why a workload is in its current phase or still waits: a summary, then one line for each reason.

    The name of a service selects its replicas that do not serve.
    """
    try:
        id_ = session.resolve(workload)
    except UnknownReference:
        if not why_service(session, workload):
            raise
        return
    body = session.client.why(id_)
    emit_one(session, body, lambda: why_page(body), name="\n".join(reason["code"] for reason in body["reasons"]))


@click.command(cls=OutputCommand)
@limit_option("workloads to show", most=10_000)
@click.pass_obj
def queue(session: Session, limit: int) -> None:
    """Show the waiting workloads in queue order.

    The rank `over` means that the tenant is over its quota; such workloads come after all levels.
    """
    body = session.client.queue(limit)
    emit_list(session, body["items"], _QUEUE_COLUMNS)
    if len(body["items"]) < body["total"]:
        say(f"showing the first {len(body['items'])} of {body['total']} workloads")
    if body["scanned_at"] and session.output in ("table", "wide"):
        say(f"last scan: {formats.ago(body['scanned_at'])}")


def _act(session: Session, references: tuple[str, ...], act: Callable[[str], Any]) -> None:
    done, code = session.each(references, act)
    if done:
        emit_list(session, done, WORKLOAD_COLUMNS)
    finish(code)


@click.command(cls=OutputCommand)
@click.argument("workloads", nargs=-1, shell_complete=complete_workload)
@label_option("Cancel all workloads with this label")
@click.option(
    "--tenant", shell_complete=complete_tenant, help="With --label: cancel only the workloads of this tenant."
)
@click.option("--waiting", "only", flag_value="waiting", help="Cancel only the elements of arrays that never started.")
@click.option(
    "--failed", "only", flag_value="failed", help="Cancel only the elements of arrays that failed and will be retried."
)
@click.pass_obj
def cancel(
    session: Session, workloads: tuple[str, ...], labels_: dict[str, str], tenant: str | None, only: str | None
) -> None:
    """Cancel workloads in any phase. NAME/INDEX is an element of an array."""
    if bool(workloads) == bool(labels_):
        raise click.UsageError("give either workloads or --label")
    if tenant and not labels_:
        raise click.UsageError("--tenant can only be used with --label")
    if only and labels_:
        raise click.UsageError(f"--{only} cannot be used with --label")
    code = 0
    if only:
        _act(session, workloads, lambda id_: session.client.cancel(id_, only))
        return
    if workloads:
        asked, code = session.each(workloads, session.client.cancel)
        ids = [workload["id"] for workload in asked]
    else:
        ids = session.client.cancel_labelled(labels_, tenant)
    done = _cancelled(session, ids)
    if done or not workloads:
        emit_list(session, done, WORKLOAD_COLUMNS)
    for workload in done:
        if workload["phase"] not in TERMINAL_PHASES:
            say(f"{workload['id']} is {workload['phase']}: it ends when its tasks have saved and stopped")
    finish(code)


def _cancelled(session: Session, ids: list[str]) -> list[Any]:
    """Return the workloads when all have ended, or after `_CANCEL_S` seconds."""
    until_s = time.monotonic() + _CANCEL_S
    done = {id_: session.client.workload(id_) for id_ in ids}
    while time.monotonic() < until_s:
        live = [id_ for id_, workload in done.items() if workload["phase"] not in TERMINAL_PHASES]
        if not live:
            break
        time.sleep(_POLL_S)
        done |= {id_: session.client.workload(id_) for id_ in live}
    return list(done.values())


@click.command(cls=OutputCommand)
@WORKLOADS
@click.pass_obj
def hold(session: Session, workloads: tuple[str, ...]) -> None:
    """Keep workloads in the queue until they are released."""
    _act(session, workloads, session.client.hold)


@click.command(cls=OutputCommand)
@WORKLOADS
@click.pass_obj
def release(session: Session, workloads: tuple[str, ...]) -> None:
    """Release held workloads, so that they can be placed again."""
    _act(session, workloads, session.client.release)


@click.command(cls=OutputCommand)
@WORKLOAD
@click.argument("level", type=click.IntRange(1, 7))
@click.pass_obj
def lower(session: Session, workload: str, level: int) -> None:
    """Lower a workload's priority to LEVEL (7 is the lowest)."""
    _act(session, (workload,), lambda id_: session.client.lower(id_, level))


@click.command(cls=OutputCommand)
@WORKLOADS
@click.pass_obj
def preempt(session: Session, workloads: tuple[str, ...]) -> None:
    """Return workloads to the queue after they have saved a checkpoint (operators)."""
    _act(session, workloads, session.client.preempt)


@click.command(cls=OutputCommand)
@WORKLOAD
@click.argument("elements", type=click.IntRange(min=0))
@click.pass_obj
def throttle(session: Session, workload: str, elements: int) -> None:
    """Set how many elements of an array run at a time; 0: as many as there is room for."""
    _act(session, (workload,), lambda id_: session.client.throttle(id_, elements))
