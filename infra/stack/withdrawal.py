"""Takes the machines of a stack out of service before the stack stops."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Engine, select, update

from domain.protocol.workload_messages import MessageKind
from domain.reasons import ReasonCode
from infra.db import outbox
from infra.db.capacity import InstanceRow
from infra.db.models import Allocation, Machine, Workload
from infra.db.session import transaction


def launched_here(engine: Engine, providers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the ids of launched machines that run on this computer. `providers` are those of the settings."""
    names = [name for name, settings in providers.items() if settings.get("kind") == "trace"]
    here = select(InstanceRow.machine).where(InstanceRow.provider.in_(names), InstanceRow.gone_at.is_(None))
    with transaction(engine) as session:
        return [machine for machine in session.scalars(here) if machine is not None]


def withdraw(
    engine: Engine, machines: Iterable[str], told: Collection[tuple[str, int]] = ()
) -> tuple[set[tuple[str, int]], float]:
    """Stops placing work on `machines`, and sends a preemption to every attempt with tasks there.

    Attempts in `told`, which were preempted before, are not preempted again. Returns the attempts that still have tasks
    there (workload id and number), and the longest grace among them in seconds. A machine takes work again when its
    agent next registers, or when a released run on it is confirmed to have ended.
    """
    ids = sorted(machines)
    with transaction(engine) as session:
        # An award also locks its machines: either it is visible below, or it finds the machines not ready.
        session.scalars(select(Machine.id).where(Machine.id.in_(ids)).order_by(Machine.id).with_for_update()).all()
        session.execute(update(Machine).where(Machine.id.in_(ids), Machine.state == "ready").values(state="joining"))
        rows = session.execute(
            select(Workload.id, Allocation.attempt, Workload.spec["checkpoint"])
            .join(Allocation, (Allocation.workload == Workload.id) & (Allocation.attempt == Workload.attempt))
            .where(Allocation.machine.in_(ids), Allocation.released_at.is_(None))
            .distinct()
        ).all()
        present = {(workload, attempt) for workload, attempt, _ in rows}
        for workload, attempt in sorted(present - set(told)):
            outbox.message(session, workload, MessageKind.PREEMPT, attempt, code=ReasonCode.STACK_STOPPED.value)
        grace_s = max((float(checkpoint["grace_s"]) for _, _, checkpoint in rows), default=0.0)
    return present, grace_s
