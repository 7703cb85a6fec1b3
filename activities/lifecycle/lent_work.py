"""Work on machines that owners lend: the limit of its launch, launches that never began, and what it has earned."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from math import inf

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from domain.lifecycle.credit import Earned
from domain.lifecycle.launch_limits import launch_limit_s
from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason, ReasonCode
from domain.slots import machines_of_tasks
from domain.spec import LimitsSpec
from domain.task_reports import TaskProgress
from infra.db import events, outbox
from infra.db.lent_machines import lent_of
from infra.db.models import Attempt, Machine, Workload

_RECENT = text(
    "select a.launch_s from attempt as a where a.launch_s is not null and not exists (select from allocation as l"
    " where (l.workload, l.attempt) = (a.workload, a.attempt) and l.machine = any(:machines))"
    " order by a.released_at desc nulls first limit 50"
)
"""What the newest launches on other machines took. The order is that of the index `attempt_window`."""
_SHORTEST_S = 15.0
"""A short maximum runtime does not make the limit shorter than this: agents send their first report after 5 s."""
_TIMEOUTS = text("select count(*) from attempt where workload = :workload and outcome ->> 'code' = :code")


def limit_of(
    session: Session, workload: str, machines: Collection[str], least_s: float, archive_bytes: int
) -> float | None:
    """Returns `Attempt.launch_limit_s` of an attempt with these lent machines; None: it has no lent machines."""
    if not machines:
        return None
    took_s = session.scalars(_RECENT, {"machines": list(machines)}).all()
    reached = {"workload": workload, "code": ReasonCode.LAUNCH_TIMED_OUT.value}
    timeouts = session.execute(_TIMEOUTS, reached).scalar_one()
    return launch_limit_s(took_s, least_s, archive_bytes, timeouts)


def earn(session: Session, attempt: Attempt, progress: Iterable[TaskProgress]) -> None:
    """Records the steps that several machines of a locked attempt have reported; nothing if none is lent."""
    if attempt.launch_limit_s is None:
        return
    machine_of = machines_of_tasks(attempt.plan["jobs"])
    steps: dict[str, int] = {}
    for one in progress:
        machine = machine_of.get((one.job, one.task))
        if machine is not None and one.step is not None:
            steps[machine] = max(one.step, steps.get(machine, 0))
    before = Earned.of(attempt.earned)
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    after = before.with_steps(steps, attempt.resumed_step, now.timestamp())
    if after != before:
        attempt.earned = after.to_json()


def inspect(
    session: Session,
    row: Workload,
    attempt: Attempt,
    told: Mapping[str, Collection[TaskProgress]],
    now: datetime,
    limits: LimitsSpec,
) -> bool:
    """Inspects a locked attempt that runs. Records what its launch took, its evidence, and the machines that answer.

    If a machine that its owner lends has reported none of its tasks since the start of the attempt, and the limit has
    passed, the workload gets the message that the machine is lost, once. Returns whether it has this message. A retry
    of the request does not restart the limit: otherwise a machine that fails each try would never reach it.

    `told` are the reports of the machines that are to run tasks, about their own tasks. `limits` are those of the
    workload. They can make the limit shorter: a machine that starts nothing must neither make the workload count as
    hung, nor use up its runtime.
    """
    began_s = 0.0 if attempt.started_at is None else attempt.started_at.timestamp()
    if attempt.launch_s is None and told and all(told.values()):
        attempt.launch_s = max(0.0, now.timestamp() - began_s)
    if attempt.launch_limit_s is None:
        return False
    earn(session, attempt, [p for reports in told.values() for p in reports])
    answering = {machine for machine, reports in told.items() if reports}
    before = Earned.of(attempt.earned)
    after = before.with_answers(answering)
    if after != before:
        attempt.earned = after.to_json()
    untried = Machine.id.in_(answering), Machine.answered_at.is_(None)
    session.execute(update(Machine).where(*untried).values(answered_at=func.now()))
    half_s = inf if limits.max_runtime_s is None else max(_SHORTEST_S, limits.max_runtime_s / 2)
    limit_s = min(attempt.launch_limit_s, limits.max_silence_s or inf, half_s)
    # An agent that has restarted reports nothing while it prepares the tasks again.
    quiet = sorted(told.keys() - set(after.answered))
    if not quiet or now.timestamp() - began_s <= limit_s:
        return False
    lent = lent_of(session, {m.id: m for m in session.scalars(select(Machine).where(Machine.id.in_(quiet)))})
    late = next((machine for machine in quiet if machine in lent), None)
    if late is not None:
        _give_up(session, row, attempt, late, limit_s)
    return late is not None


def _give_up(session: Session, row: Workload, attempt: Attempt, machine: str, limit_s: float) -> None:
    detail = {"machine": machine, "limit_s": round(limit_s, 1), "avoided": [machine]}
    if events.record(
        session,
        "workload.launch_timed_out",
        tenant=row.tenant,
        workload=row.id,
        attempt=attempt.attempt,
        region=row.region,
        machine=machine,
        reason=Reason(ReasonCode.LAUNCH_TIMED_OUT, detail),
        dedup=f"{attempt.attempt}:late",
    ):
        code = ReasonCode.LAUNCH_TIMED_OUT.value
        outbox.message(session, row.id, MessageKind.MACHINE_LOST, attempt.attempt, code=code, **detail)
