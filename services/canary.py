"""Canaries: some replicas of a new version get a share of the requests, and their answers judge its update. Pure.

Until the version has passed, everything else about the service is decided as if it did not exist: the replicas of the
last good version stay, and the policy and the autoscaler see only them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from domain.capacity import CapacityKind
from services.values import (
    CanaryAnswers,
    CanaryRules,
    CanaryState,
    CanaryVerdict,
    DrainReplica,
    EndCause,
    EndReplica,
    LaunchReplica,
    Loss,
    LossKind,
    ReplicaAction,
    ReplicaFacts,
    ServicePlan,
    ServiceState,
    Stage,
)

LEAST_ANSWERS = 20
"""A limit is checked once there are this many answers."""
MOST_FAILURES = 3
"""A canary fails once this many of its replicas have failed by themselves."""
CANARY_RUNS, CANARY_WAITS, CANARY_FAILED = "canary_runs", "canary_waits", "canary_failed"
"""The notes that a canary is judged, that it needs more answers, and that its update was given up."""
_CERTAIN = math.log(10_000)
"""A limit is clearly broken if a version at the limit gives such answers in less than one of 10,000 cases."""
_SLOW_SHARE = 0.1
"""The 90th percentile is above a limit exactly if more than this share of the answers takes longer."""


def broken_limit(rules: CanaryRules, answers: CanaryAnswers, *, is_over: bool) -> str:
    """Returns which limit the answers break; empty: none.

    Args:
        rules: the limits.
        answers: the answers since the canary began.
        is_over: whether its time limit has passed. Before, a limit must be clearly broken: chance must not decide.
    """
    if _is_broken(answers.failed, answers.total, rules.error_rate, is_over=is_over):
        others = f"{answers.others_failed} of {answers.others_total}"
        return (
            f"{answers.failed} of its {answers.total} answers failed, more than {100 * (rules.error_rate or 0):.3g} %;"
            f" of the older version's, {others} failed"
        )
    if rules.p90_s is not None and _is_broken(answers.slow, answers.answered, _SLOW_SHARE, is_over=is_over):
        limit = f"{1000 * rules.p90_s:g} ms"
        return f"{answers.slow} of its {answers.answered} answers took more than {limit}, which is the limit for 90 %"
    return ""


def has_enough(rules: CanaryRules, answers: CanaryAnswers) -> bool:
    """Returns whether there are enough answers to check each limit."""
    are_checked = rules.error_rate is None or answers.total >= LEAST_ANSWERS
    return are_checked and (rules.p90_s is None or answers.answered >= LEAST_ANSWERS)


def _is_broken(bad: int, total: int, limit: float | None, *, is_over: bool) -> bool:
    """Returns whether the share of bad answers is above a limit. Before the end, it must certainly be (Chernoff)."""
    if limit is None or total < LEAST_ANSWERS or bad <= limit * total + 1e-9:
        return False
    return is_over or limit == 0 or total * _divergence(bad / total, limit) > _CERTAIN


def _divergence(share: float, limit: float) -> float:
    """Returns the relative entropy of two shares, of which `limit` is above 0 and the smaller one, in nats."""
    rest = (1 - share) * math.log((1 - share) / (1 - limit)) if share < 1 else 0.0
    return share * math.log(share / limit) + rest


@dataclass
class CanaryStep:
    """The part of a decision that is about the canary of the newest version."""

    plan: ServicePlan
    """What the service should be, apart from the canary."""
    state: ServiceState
    rest: list[ReplicaFacts]
    """The replicas that are not the canary's."""
    now_s: float
    actions: list[ReplicaAction] = field(default_factory=list)
    wakes_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def retire(self, replicas: Sequence[ReplicaFacts], cause: EndCause) -> None:
        """Ends replicas of the canary: at once while they start, and otherwise after their requests in progress."""
        for one in replicas:
            self.actions.append((EndReplica if one.stage is Stage.STARTING else DrainReplica)(one.number, cause))
        self.wakes_s.append(self.now_s + self.plan.drain_s)


def step_canary(
    plan: ServicePlan,
    state: ServiceState,
    replicas: Sequence[ReplicaFacts],
    losses: Sequence[Loss],
    answers: CanaryAnswers,
    now_s: float,
) -> CanaryStep:
    """Takes one decision about the canary of the newest version, if it has one.

    Args:
        plan: the desired state of the service.
        state: the state at the beginning of the decision, with the target.
        replicas: the replicas that have been launched and have not ended.
        losses: the replicas that have ended since the decision before without a request to end them.
        answers: the answers since the canary began.
        now_s: seconds since the epoch.
    """
    step = CanaryStep(plan, state, list(replicas), now_s)
    before = state.canary
    if before is not None and before.version != plan.version:
        _supersede(step, before)
        step.state = replace(state, canary=None)
    if plan.canary is None or not state.is_on_trial(plan.version, has_canary=True):
        return step
    canary = step.state.canary or CanaryState(plan.version)
    mine = _split(step, plan.version)
    if canary.verdict is None:
        canary = _judged(step, plan.canary, _followed(step, canary, mine, losses), mine, answers)
    step.plan = replace(plan, version=state.good_version)
    step.state = replace(step.state, canary=canary)
    if canary.verdict is CanaryVerdict.FAILED:
        step.state = replace(step.state, failed_version=plan.version)
        step.notes.append(CANARY_FAILED)
        _retire_if_others_serve(step, mine, EndCause.UPDATE_GIVEN_UP)
    elif canary.verdict is CanaryVerdict.PASSED:
        step.wakes_s.append(now_s)  # The next decision replaces the other replicas.
    else:
        _launch(step, plan, plan.canary, canary, mine)
    return step


def _supersede(step: CanaryStep, canary: CanaryState) -> None:
    if canary.verdict is not CanaryVerdict.PASSED:
        _retire_if_others_serve(step, _split(step, canary.version), EndCause.SUPERSEDED)


def _split(step: CanaryStep, version: int) -> list[ReplicaFacts]:
    """Returns the replicas of a version that do not leave or drain, and removes them from `rest`."""
    stages = (Stage.STARTING, Stage.READY, Stage.UNREADY)
    mine = [one for one in step.rest if one.version == version and one.stage in stages]
    step.rest = [one for one in step.rest if one not in mine]
    return mine


def _retire_if_others_serve(step: CanaryStep, mine: list[ReplicaFacts], cause: EndCause) -> None:
    """Ends the replicas of a canary, but keeps those that are ready while no other replica of the service is."""
    if any(one.stage is Stage.READY for one in step.rest):
        step.retire(mine, cause)
        return
    step.retire([one for one in mine if one.stage is not Stage.READY], cause)


def _followed(
    step: CanaryStep, canary: CanaryState, mine: Sequence[ReplicaFacts], losses: Sequence[Loss]
) -> CanaryState:
    """Returns the canary after the launches, losses and ends of its replicas."""
    plan, state, now_s = step.plan, step.state, step.now_s
    is_served = any(one.stage is Stage.READY for one in step.rest)
    if state.failures and not is_served:
        return replace(canary, verdict=CanaryVerdict.PASSED, why="the older version fails")
    for loss in losses:
        if loss.kind is LossKind.FAILED and loss.replica.version == canary.version:
            failures = canary.failures + 1
            canary = replace(canary, failures=failures, retry_at_s=now_s + plan.failed_pause_s * 2.0 ** (failures - 1))
    if canary.failures >= MOST_FAILURES:
        return _failed(canary, f"{canary.failures} of its replicas failed by themselves")
    for one in mine:
        if one.is_ejected:
            return _failed(canary, f"balancers have ejected replica {one.number}, because its requests fail or hang")
        limit_s = plan.unready_s if one.stage is Stage.UNREADY else plan.queued_s if one.is_queued else math.inf
        if one.since_s + limit_s <= now_s:
            what = "has not answered its probe" if one.stage is Stage.UNREADY else "has waited for machines"
            return _failed(canary, f"replica {one.number} {what} for {limit_s:g} s")
        step.wakes_s += [one.since_s + limit_s] if limit_s < math.inf else []
    ready = sum(one.stage is Stage.READY for one in mine)
    if canary.since_s is None and plan.canary is not None and ready >= max(1, _wanted(state, plan.canary)):
        return replace(canary, since_s=now_s)
    return canary


def _judged(
    step: CanaryStep, rules: CanaryRules, canary: CanaryState, mine: Sequence[ReplicaFacts], answers: CanaryAnswers
) -> CanaryState:
    """Returns the canary after its answers were compared with the limits."""
    if canary.verdict is not None or canary.since_s is None:
        return canary
    is_over = step.now_s >= canary.since_s + rules.for_s
    why = broken_limit(rules, answers, is_over=is_over)
    if why:
        return _failed(canary, why)
    if is_over and has_enough(rules, answers) and any(one.stage is Stage.READY for one in mine):
        return replace(canary, verdict=CanaryVerdict.PASSED, why=f"{answers.failed} of {answers.total} answers failed")
    step.notes.append(CANARY_WAITS if is_over else CANARY_RUNS)
    step.wakes_s += [] if is_over else [canary.since_s + rules.for_s]
    return canary


def _failed(canary: CanaryState, why: str) -> CanaryState:
    return replace(canary, verdict=CanaryVerdict.FAILED, why=why)


def _wanted(state: ServiceState, rules: CanaryRules) -> int:
    """Returns the number of replicas of a canary: its share of the target, rounded up."""
    return math.ceil(rules.share * state.scaling.target - 1e-9)


def _launch(
    step: CanaryStep, plan: ServicePlan, rules: CanaryRules, canary: CanaryState, mine: Sequence[ReplicaFacts]
) -> None:
    """Launches the missing replicas of a canary, beside the replicas that they may succeed later."""
    state, now_s = step.state, step.now_s
    if not state.scaling.target:
        step.retire(mine, EndCause.SCALED_DOWN)
    retry_at_s = max(canary.retry_at_s, state.retry_at_s)
    if now_s < retry_at_s:
        step.wakes_s.append(retry_at_s)
        return
    paired = {one.replaces for one in mine}
    stages = (Stage.STARTING, Stage.READY, Stage.UNREADY)
    free = [one for one in step.rest if one.stage in stages and one.number not in paired]
    free.sort(key=lambda one: (one.stage is not Stage.READY, one.number))
    for one in free[: max(0, _wanted(state, rules) - len(mine))]:
        kind, zone = _place(rules, one, is_refused=one.number in state.refused_for)
        if kind is CapacityKind.SPOT or now_s >= state.on_demand_at_s:
            step.actions.append(LaunchReplica(plan.version, kind, zone, one.is_base, one.number))
        else:
            step.wakes_s.append(state.on_demand_at_s)


def _place(rules: CanaryRules, one: ReplicaFacts, *, is_refused: bool) -> tuple[CapacityKind, str | None]:
    """Returns the kind and the zone of the replica that may succeed `one`: as before, if the new version allows it."""
    if is_refused or one.kind is not CapacityKind.SPOT or not rules.zones:
        return CapacityKind.ON_DEMAND, None
    return CapacityKind.SPOT, one.zone if one.zone in rules.zones else min(rules.zones)
