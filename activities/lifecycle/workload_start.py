"""Starts a workload's workflow with its state from Postgres, and with the attributes that Temporal's UI shows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sqlalchemy import Row, bindparam, func, select, text
from sqlalchemy.orm import Session
from temporalio.client import Client
from temporalio.common import SearchAttributeKey, SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from domain import ids
from domain.lifecycle.attempts import LATEST
from domain.lifecycle.endings import FAILURES
from domain.lifecycle.launch_limits import is_only_launch
from domain.lifecycle.retry_limits import PREEMPTIONS, exit_status
from domain.lifecycle.suspicion import NONE, Suspicion
from domain.phases import PLACED_PHASES, Phase
from domain.protocol.workloads import WorkloadInput
from domain.reasons import ReasonCode
from domain.search_attributes import ATTEMPT, NAME, PHASE, PRIORITY, REASON, REGION, TENANT
from infra.db.models import Attempt

_LIVE = text(
    "select id, name, tenant, region, reason, phase, attempt,"
    " coalesce((spec ->> 'one_attempt')::boolean, false) as one_attempt,"
    " (spec -> 'limits' ->> 'max_preemptions')::int as max_preemptions,"
    " (spec -> 'limits' ->> 'max_losses')::int as max_losses,"
    " jsonb_path_exists(spec, '$.jobs[*].image ? (@ != null)') as brings_image"
    " from workload where id = :workload and finished_at is null"
)
_ENDED_AT = func.coalesce(Attempt.released_at, func.now())
_ATTEMPTS = (
    select(
        Attempt.attempt,
        Attempt.outcome,
        Attempt.ready_at,
        Attempt.rank,
        Attempt.released_at,
        Attempt.plan,
        Attempt.last_step,
        Attempt.checkpoint_step,
        Attempt.resumed_step,
        func.coalesce(func.extract("epoch", _ENDED_AT - Attempt.started_at), 0.0).label("ran_s"),
    )
    .where(Attempt.workload == bindparam("workload"))
    .order_by(Attempt.attempt.desc())
)
_NEVER_RAN = {code.value for code in (ReasonCode.LAUNCH_FAILED, ReasonCode.LAUNCH_TIMED_OUT, ReasonCode.CANNOT_START)}
"""The reasons of attempts whose tasks a machine refused or did not start. They can have a start time all the same."""


@dataclass(frozen=True)
class Start:
    """The input and attributes with which a live workload's workflow starts."""

    state: WorkloadInput
    summary: str
    memo: dict[str, Any]
    shown: dict[str, str | int]
    """The search attributes and their values."""


def read_start(session: Session, workload: str) -> Start | None:
    """Returns the input with which a workload's workflow starts now; None: it has ended or does not exist."""
    row = session.execute(_LIVE, {"workload": workload}).first()
    if row is None:
        return None
    state, rank = WorkloadInput(row.id, table=LATEST, one_attempt=row.one_attempt), None
    if row.attempt > 0:
        state, rank = _state_of(session, row)
    state.max_preemptions, state.max_losses = row.max_preemptions, row.max_losses
    state.brings_image = row.brings_image
    code = (row.reason or {}).get("code", ReasonCode.SCAN_PENDING.value)
    facts = {"name": row.name, "tenant": row.tenant, "region": row.region or "", "reason": code}
    shown: dict[str, str | int] = {
        TENANT: row.tenant, NAME: row.name, PHASE: row.phase, REASON: code, ATTEMPT: row.attempt,
    }  # fmt: skip
    if row.region is not None:
        shown[REGION] = row.region
    if rank is not None:
        shown[PRIORITY] = rank
    return Start(state, f"{row.name} of {row.tenant}", facts, shown)


def _state_of(session: Session, row: Row[Any]) -> tuple[WorkloadInput, int | None]:
    """Returns the state and rank of a workload that was placed before, with the counts and runtime of its attempts."""
    attempts = session.execute(_ATTEMPTS, {"workload": row.id}).all()
    placed = row.phase in PLACED_PHASES
    ends = [a.outcome or {} for a in attempts if a.released_at is not None]
    codes = [end.get("code") for end in ends]
    suspicion = _suspicion_of(a for a in attempts if a.released_at is not None)
    state = WorkloadInput(
        row.id,
        attempt=row.attempt,
        placed=placed,
        ready=placed and bool(attempts) and attempts[0].ready_at is not None,
        stopping=row.phase == Phase.CHECKPOINTING,
        failures=sum(code in FAILURES for code in codes),
        by_exit=Counter(
            exit_status(end.get("detail", {}).get("status", "")) for end in ends if end.get("code") in FAILURES
        ),
        preemptions=sum(code in PREEMPTIONS for code in codes),
        losses=codes.count(ReasonCode.MACHINE_LOST.value),
        hangs=_in_a_row(codes, ReasonCode.NO_PROGRESS),
        unloadable=_in_a_row(codes, ReasonCode.CHECKPOINT_UNLOADABLE),
        suspects=list(suspicion.machines),
        unconfirmed=suspicion.attempts,
        ran_s=sum(float(a.ran_s) for a in attempts if not _never_ran(a)),
        table=LATEST,
        one_attempt=row.one_attempt,
    )
    return state, attempts[0].rank if placed and attempts else None


def _never_ran(ended: Row[*tuple[Any, ...]]) -> bool:
    """Returns whether an attempt was only launched, by the rules of `workflows.attempt`."""
    code = (ended.outcome or {}).get("code")
    timed_out = code == ReasonCode.LAUNCH_TIMED_OUT.value
    reported = ended.last_step is not None or ended.checkpoint_step is not None
    return code in _NEVER_RAN and is_only_launch(float(ended.ran_s), timed_out=timed_out, reported=reported)


def _suspicion_of(ended: Iterable[Row[*tuple[Any, ...]]]) -> Suspicion:
    """Returns the failures that `domain.lifecycle.endings` does not confirm. `ended`: newest first."""
    advanced: list[set[str]] = []
    for one in ended:
        outcome = one.outcome or {}
        if outcome.get("code") in FAILURES:
            return NONE
        if outcome.get("code") == ReasonCode.UNCONFIRMED_FAILURE.value:
            suspects, attempts = outcome["detail"]["suspects"], outcome["detail"]["attempts"]
            works_without = any(machines.isdisjoint(suspects) for machines in advanced)
            return NONE if works_without else Suspicion(tuple(suspects), attempts)
        if one.last_step is not None and one.last_step > (one.resumed_step or 0):
            advanced.append({machine for job in one.plan["jobs"] for machine, _ in job["machines"]})
    return NONE


def _in_a_row(codes: Sequence[str | None], code: ReasonCode) -> int:
    """Returns how many of the newest attempts ended with `code` consecutively. `codes` are sorted newest first."""
    return len(list(takewhile(lambda found: found == code.value, codes)))


async def start_workflow(client: Client, start: Start) -> bool:
    """Starts the workflow; returns False if it already runs."""
    pairs: list[SearchAttributePair[Any]] = [
        SearchAttributePair(SearchAttributeKey.for_int(name), value)
        if isinstance(value, int)
        else SearchAttributePair(SearchAttributeKey.for_keyword(name), value)
        for name, value in start.shown.items()
    ]
    try:
        await client.start_workflow(
            "WorkloadWorkflow",
            start.state,
            id=ids.workload_workflow_id(start.state.workload_id),
            task_queue=ids.CONTROL_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            search_attributes=TypedSearchAttributes(pairs),
            static_summary=start.summary,
            memo=start.memo,
        )
    except WorkflowAlreadyStartedError:
        return False
    return True
