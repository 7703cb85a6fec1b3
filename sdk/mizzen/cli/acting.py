"""Commands that change workloads."""

from collections.abc import Callable
from typing import Any

import click

from mizzen.cli.output import emit_list
from mizzen.cli.reading import WORKLOAD_COLUMNS
from mizzen.cli.session import WORKLOAD, WORKLOADS, Command, Session, complete_workload, finish, labels


def _act(session: Session, references: tuple[str, ...], act: Callable[[str], Any]) -> None:
    done, code = session.each(references, act)
    if done:
        emit_list(session, done, WORKLOAD_COLUMNS)
    finish(code)


@click.command(cls=Command)
@click.argument("workloads", nargs=-1, shell_complete=complete_workload)
@click.option("--label", "labels_", multiple=True, callback=labels, metavar="KEY=VALUE", help="All with this label.")
@click.option("--tenant", help="With --label: only this tenant's.")
@click.pass_obj
def cancel(session: Session, workloads: tuple[str, ...], labels_: dict[str, str], tenant: str | None) -> None:
    """Cancel workloads, in whatever phase they are."""
    if bool(workloads) == bool(labels_):
        raise click.UsageError("give workloads, or --label")
    if tenant and not labels_:
        raise click.UsageError("--tenant belongs to --label")
    if workloads:
        _act(session, workloads, session.client.cancel)
    ids = session.client.cancel_labelled(labels_, tenant)
    emit_list(session, [session.client.workload(id_) for id_ in ids], WORKLOAD_COLUMNS)


@click.command(cls=Command)
@WORKLOADS
@click.pass_obj
def hold(session: Session, workloads: tuple[str, ...]) -> None:
    """Keep workloads in the queue until they are released."""
    _act(session, workloads, session.client.hold)


@click.command(cls=Command)
@WORKLOADS
@click.pass_obj
def release(session: Session, workloads: tuple[str, ...]) -> None:
    """Let held workloads go on."""
    _act(session, workloads, session.client.release)


@click.command(cls=Command)
@WORKLOAD
@click.argument("level", type=click.IntRange(1, 7))
@click.pass_obj
def lower(session: Session, workload: str, level: int) -> None:
    """Lower a workload's priority to LEVEL (7 is the lowest)."""
    _act(session, (workload,), lambda id_: session.client.lower(id_, level))


@click.command(cls=Command)
@WORKLOADS
@click.pass_obj
def preempt(session: Session, workloads: tuple[str, ...]) -> None:
    """Send workloads back to the queue after a checkpoint (operators)."""
    _act(session, workloads, session.client.preempt)
