"""Publishes why workloads wait: the reasons of every region, written only if they have changed.

If no region has both a workload's hardware and its tables, copies of the tables are started and shown in the reasons.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, select, text

from activities.data import on_demand
from activities.scheduling.bids import BidSubject, region_bid
from activities.scheduling.scheduler_state import SchedulerState
from domain.phases import QUEUED_PHASES, Phase
from domain.reasons import Reason
from domain.scheduling import Bid
from gms.auction.candidate import AuctionOutcome
from infra.db.logs import Waiting
from infra.db.models import Workload
from infra.db.session import transaction

_WRITE = text(
    # The rows are locked first, so that a workload that is awarded or ends concurrently gets no reasons.
    "with queued as (select id from workload where id = any(:ids) and phase = any(:phases) order by id for update)"
    " insert into waiting (workload, reasons)"
    " select n.id, n.body::jsonb from unnest(cast(:ids as text[]), cast(:bodies as text[])) as n (id, body)"
    " join queued on queued.id = n.id order by n.id"
    " on conflict (workload) do update set reasons = excluded.reasons, at = now()"
)


def explain(engine: Engine, waiting: Mapping[str, Sequence[Reason]]) -> None:
    """Publishes the ordered reasons of waiting workloads. Workloads that are no longer queued are skipped."""
    if not waiting:
        return
    with transaction(engine) as session:
        written = select(Waiting.workload, Waiting.reasons).where(Waiting.workload.in_(sorted(waiting)))
        known = {workload: body["reasons"] for workload, body in session.execute(written)}
        # Most reasons have not changed. Their sentences are not generated again.
        new = {w: reasons for w, reasons in waiting.items() if not _says(known.get(w), reasons)}
        if new:
            texts = [json.dumps({"reasons": [r.to_json() for r in reasons]}) for reasons in new.values()]
            session.execute(_WRITE, {"ids": list(new), "phases": sorted(QUEUED_PHASES), "bodies": texts})


def explain_batch(
    engine: Engine,
    state: SchedulerState,
    waiting: Sequence[BidSubject],
    outcomes: Mapping[str, AuctionOutcome],
    conflicts: Mapping[str, Reason],
    unreachable: Sequence[str],
) -> None:
    """Publishes why the workloads of a batch wait, and starts copies of tables where only data is missing.

    `conflicts`: by workload, a reason that replaces the regions' reasons. `unreachable`: regions that took no part in
    the auction.
    """
    reasons = dict[str, list[Reason]]()
    for a in waiting:
        if a.queued.row in reasons:
            continue  # The row of an array says why its first element waits.
        workload, outcome = a.queued.workload, outcomes[a.queued.workload]
        found = [conflicts[workload]] if workload in conflicts else list(outcome.reasons)
        if a.queued.reason is not None:
            found.insert(0, a.queued.reason)
        targets = on_demand.targets(outcome.bids.values())
        if workload not in conflicts and targets:
            reachable = [region for region in targets if region not in unreachable]
            found = _bring_data(engine, state, a, reachable, unreachable) + found
        reasons[a.queued.row] = found
    explain(engine, reasons)


def _bring_data(
    engine: Engine, state: SchedulerState, a: BidSubject, reachable: Sequence[str], unreachable: Sequence[str]
) -> list[Reason]:
    """Starts copies of a workload's tables, if it is still queued and a copy helps; returns the reasons to show."""
    offers: list[Bid] = []
    with transaction(engine) as session:
        if on_demand.may_be_placed_later(session, a.demand, a.level, unreachable):
            return []
        if not on_demand.is_on_its_way(session, a.queued.row, a.demand.tables):
            offers = [region_bid(state.planner(r), a, ignore_data=True) for r in reachable if r in state.regions]
    with transaction(engine) as session:
        row = session.get(Workload, a.queued.row, with_for_update=True)
        if row is None or Phase(row.phase) not in QUEUED_PHASES:
            return []
        return on_demand.bring_data(session, row, a.demand, a.level, offers)


def _says(written: list[dict[str, Any]] | None, reasons: Sequence[Reason]) -> bool:
    """Returns whether the written reasons have the same codes and details."""
    return written is not None and [(w["code"], w["detail"]) for w in written] == [
        (reason.code.value, reason.detail) for reason in reasons
    ]
