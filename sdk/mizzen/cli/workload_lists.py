"""Commands that show workloads and the queue."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import click

from mizzen.cli import formats
from mizzen.cli.pages import show_page, why_page
from mizzen.cli.plain.printer import Column, emit_list, emit_one
from mizzen.cli.session import (
    WORKLOAD,
    OutputCommand,
    Session,
    complete_phase,
    complete_tenant,
    label_option,
    limit_option,
    say,
)


def _step(workload: Mapping[str, Any]) -> object:
    return (workload["progress"] or {}).get("step")


WORKLOAD_COLUMNS = (
    Column("ID", lambda w: w["id"]),
    Column("NAME", lambda w: w["name"], flexible=True),
    Column("TENANT", lambda w: w["tenant"], drop=2, flexible=True),
    Column("PHASE", lambda w: "held" if w["held_by"] and w["queued"] else w["phase"]),
    Column("REGION", lambda w: w["region"], drop=3),
    Column("STEP", _step, drop=5, right=True),
    Column("PREEMPTED", lambda w: w["preemptions"], drop=6, right=True),
    Column("AGE", lambda w: formats.between(w["submitted_at"], None), drop=1, right=True),
    Column("LEVEL", lambda w: w["level"], drop=4, right=True),
    Column("ATTEMPT", lambda w: w["attempt"], wide=True, right=True),
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


@click.command(cls=OutputCommand)
@click.option("--tenant", shell_complete=complete_tenant, help="List only the workloads of this tenant.")
@click.option(
    "--phase",
    "phases",
    multiple=True,
    shell_complete=complete_phase,
    help="List only the workloads in this phase; also `held` or `live` (repeatable).",
)
@click.option("--live", is_flag=True, help="List only the workloads that have not ended.")
@label_option("List only the workloads with this label")
@click.option("--name", help="List only the workloads with this name.")
@limit_option("workloads to list; 0: all", least=0)
@click.pass_obj
def ls(
    session: Session,
    tenant: str | None,
    phases: tuple[str, ...],
    live: bool,
    labels_: dict[str, str],
    name: str | None,
    limit: int,
) -> None:
    """List workloads."""
    if live and phases:
        raise click.UsageError("--live and --phase cannot be used together")
    if live:
        phases = ("live",)
    one_more = limit + 1 if limit else None
    found = session.client.workloads(tenant=tenant, phases=phases, labels=labels_, name=name, limit=one_more)
    workloads = list(islice(found, limit) if limit else found)
    emit_list(session, workloads, WORKLOAD_COLUMNS)
    if limit and next(found, None) is not None:
        say(f"there are more than {limit} workloads; `--limit 0` lists all")


@click.command(cls=OutputCommand)
@WORKLOAD
@click.pass_obj
def show(session: Session, workload: str) -> None:
    """Show one workload with its attempts."""
    id_ = session.resolve(workload)
    body = {**session.client.workload(id_), "attempts": session.client.attempts(id_)}
    emit_one(session, body, lambda: show_page(body))


@click.command(cls=OutputCommand)
@WORKLOAD
@click.pass_obj
def why(session: Session, workload: str) -> None:
    """Explain why a workload is in its current phase or still waits: a summary, then one line for each reason."""
    body = session.client.why(session.resolve(workload))
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
