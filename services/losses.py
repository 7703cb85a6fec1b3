"""The effects of replicas that have ended or leave: backoff, the end of an update, and events for the policy."""

from collections.abc import Sequence
from dataclasses import replace

from domain.capacity import CapacityKind
from services.spot.values import ZoneEvent, ZoneEventKind
from services.values import Loss, LossKind, ReplicaFacts, ServicePlan, ServiceState, Stage

FAILURES_IN_A_ROW = 3
"""An update is given up after this many failed replicas of the new version, if none of them has been ready."""


def is_halted(newest: int, version: int, failures: int, good_version: int) -> bool:
    """Returns whether a failure gives up the update: an older version works, and the newest one never did.

    Args:
        newest: the version of the update.
        version: the version of the replica that failed.
        failures: the number of failed replicas in a row, with this one.
        good_version: the newest version of which a replica has been ready; 0: none.
    """
    return version == newest and 0 < good_version < newest and failures >= FAILURES_IN_A_ROW


_LONGEST_PAUSE_S = 300.0
"""The longest backoff after failed replicas. It doubles with each failure in a row."""
_STOPPED_PAUSE_S = 30.0
"""The pause after a replica was stopped with the installation: what would be launched meanwhile is stopped, too."""
CANNOT_COUNT = frozenset({Stage.LEAVING, Stage.DRAINING})
"""The stages of replicas that no longer count."""


def after_losses(plan: ServicePlan, state: ServiceState, losses: Sequence[Loss], now_s: float) -> ServiceState:
    """Returns the state after losses: with pauses of launches, and perhaps with the end of the update."""
    for loss in losses:
        one = loss.replica
        if loss.kind is LossKind.FAILED and one.stage not in CANNOT_COUNT and one.version == state.launching:
            failures = state.failures + 1
            state = replace(state, failures=failures, retry_at_s=now_s + _pause_s(plan, failures))
            if is_halted(plan.version, one.version, failures, state.good_version):
                state = replace(state, failed_version=plan.version)
        elif loss.kind is LossKind.NOT_STARTED:  # It does not count towards the end of an update.
            unstarted = state.unstarted + 1
            retry_at_s = max(state.retry_at_s, now_s + _pause_s(plan, unstarted))
            state = replace(state, unstarted=unstarted, retry_at_s=retry_at_s)
        elif loss.kind is LossKind.STOPPED:
            state = replace(state, retry_at_s=max(state.retry_at_s, now_s + _STOPPED_PAUSE_S))
        elif loss.kind is LossKind.REFUSED:
            if one.kind is not CapacityKind.SPOT:
                state = replace(state, on_demand_at_s=now_s + plan.refused_pause_s)
            if one.replaces is not None:
                state = replace(state, refused_for=tuple(sorted({*state.refused_for, one.replaces})))
    return state


def _pause_s(plan: ServicePlan, times: int) -> float:
    """Returns the pause after so many replicas in a row that failed, or were not started, in seconds."""
    return min(_LONGEST_PAUSE_S, plan.failed_pause_s * 2.0 ** min(times - 1, 10))


def zone_events(replicas: Sequence[ReplicaFacts], losses: Sequence[Loss]) -> tuple[ZoneEvent, ...]:
    """Returns the events for the policy. A replica counts as preempted when it begins to leave, not when it ends."""
    events: list[ZoneEvent] = []
    kinds = {LossKind.PREEMPTED: ZoneEventKind.PREEMPTED, LossKind.REFUSED: ZoneEventKind.REFUSED}
    for loss in losses:
        one = loss.replica
        told = one.was_leaving or one.stage is Stage.DRAINING
        if one.zone is not None and one.kind is CapacityKind.SPOT and loss.kind in kinds and not told:
            events.append(ZoneEvent(kinds[loss.kind], one.zone))
    for one in replicas:
        if one.zone is None or one.kind is not CapacityKind.SPOT:
            continue
        if one.stage is Stage.LEAVING and not one.was_leaving:
            events.append(ZoneEvent(ZoneEventKind.PREEMPTED, one.zone))
        elif one.stage is Stage.READY and not one.was_ready:
            events.append(ZoneEvent(ZoneEventKind.READY, one.zone))
    return tuple(events)
