"""Taking machines out of the fleet before they are stopped: no new work, and what runs there saves and goes."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Engine, select, update

from domain.protocol import MailKind
from domain.reasons import ReasonCode
from infra.db import outbox
from infra.db.capacity import InstanceRow
from infra.db.models import Allocation, Machine, Workload
from infra.db.session import transaction


def launched_here(engine: Engine, providers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Machines that were launched and run on this computer. `providers`: as in the settings."""
    names = [name for name, settings in providers.items() if settings.get("kind") == "trace"]
    here = select(InstanceRow.machine).where(InstanceRow.provider.in_(names), InstanceRow.gone_at.is_(None))
    with transaction(engine) as session:
        return [machine for machine in session.scalars(here) if machine is not None]


def withdraw(
    engine: Engine, machines: Iterable[str], told: Collection[tuple[str, int]] = ()
) -> tuple[set[tuple[str, int]], float]:
    """Keeps new work from `machines` and asks every attempt that has something there to save and stop.

    The machines take work again when their agents next announce themselves, or once a run that a gang gave up
    there is known to have ended. Returns the attempts that are still there
    (workload id and number), and the longest grace among them in seconds. Those that were `told` before are not asked
    again.
    """
    ids = sorted(machines)
    with transaction(engine) as session:
        # An award locks its machines, too: it is either seen below, or finds them unready.
        session.scalars(select(Machine.id).where(Machine.id.in_(ids)).order_by(Machine.id).with_for_update()).all()
        session.execute(update(Machine).where(Machine.id.in_(ids), Machine.state == "ready").values(state="joining"))
        rows = session.execute(
            select(Workload.id, Allocation.attempt, Workload.spec["checkpoint"])
            .join(Allocation, Allocation.workload == Workload.id)
            .where(Allocation.machine.in_(ids), Allocation.released_at.is_(None))
            .distinct()
        ).all()
        present = {(workload, attempt) for workload, attempt, _ in rows}
        for workload, attempt in sorted(present - set(told)):
            outbox.mail(session, workload, MailKind.PREEMPT, attempt, code=ReasonCode.STACK_STOPPED.value)
        grace_s = max((float(checkpoint["grace_s"]) for _, _, checkpoint in rows), default=0.0)
    return present, grace_s
