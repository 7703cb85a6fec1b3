"""Commands that change workloads."""

import time
from collections.abc import Callable
from typing import Any

import click

from mizzen.cli.plain.printer import emit_list
from mizzen.cli.session import WORKLOAD, WORKLOADS, OutputCommand, Session, complete_workload, finish, label_option, say
from mizzen.cli.workload_lists import WORKLOAD_COLUMNS
from mizzen.client.views import TERMINAL_PHASES

_CANCEL_S = 2.0
"""The time that `cancel` waits for its workloads to end before it prints them. Workloads without slots end at once."""
_POLL_S = 0.2


def _act(session: Session, references: tuple[str, ...], act: Callable[[str], Any]) -> None:
    done, code = session.each(references, act)
    if done:
        emit_list(session, done, WORKLOAD_COLUMNS)
    finish(code)


@click.command(cls=OutputCommand)
@click.argument("workloads", nargs=-1, shell_complete=complete_workload)
@label_option("Cancel all workloads with this label")
@click.option("--tenant", help="With --label: cancel only the workloads of this tenant.")
@click.pass_obj
def cancel(session: Session, workloads: tuple[str, ...], labels_: dict[str, str], tenant: str | None) -> None:
    """Cancel workloads in any phase."""
    if bool(workloads) == bool(labels_):
        raise click.UsageError("give either workloads or --label")
    if tenant and not labels_:
        raise click.UsageError("--tenant can only be used with --label")
    code = 0
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
