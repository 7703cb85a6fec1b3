"""Canaries: the judgement by answers, and the replicas of a version that is judged."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.capacity import CapacityKind
from services.canary import LEAST_ANSWERS, MOST_FAILURES, broken_limit, has_enough
from services.controller import decide
from services.spot.autoscaler import LoadAutoscaler
from services.spot.policies import PolicySettings, make_policy
from services.values import (
    NO_ANSWERS,
    SERVICE_STATE,
    CanaryAnswers,
    CanaryRules,
    CanaryVerdict,
    DrainReplica,
    EndCause,
    EndReplica,
    LaunchReplica,
    Loss,
    LossKind,
    ReplicaFacts,
    ServiceDecision,
    ServicePlan,
    ServiceState,
    Stage,
)

_RULES = CanaryRules(share=0.1, for_s=600.0, error_rate=0.01, p90_s=0.5)
_GOOD = CanaryAnswers(answered=100)

# -------------------------------------------------------------------------------------------------------- the judgement


@pytest.mark.parametrize(
    ("answers", "early", "late"),
    [
        (CanaryAnswers(), False, False),
        (CanaryAnswers(answered=LEAST_ANSWERS - 2, failed=1), False, False),
        (CanaryAnswers(answered=LEAST_ANSWERS - 1, failed=1), False, True),  # 5 %, perhaps by chance
        (CanaryAnswers(answered=99, failed=1), False, False),  # exactly the limit
        (CanaryAnswers(answered=15, failed=5), True, True),
        (CanaryAnswers(answered=90, failed=10), True, True),
        (CanaryAnswers(answered=20, slow=2), False, False),
        (CanaryAnswers(answered=20, slow=3), False, True),
        (CanaryAnswers(answered=20, slow=12), True, True),
        (CanaryAnswers(answered=LEAST_ANSWERS - 1, slow=19), False, False),
    ],
)
def test_a_limit_is_broken_by_enough_answers(answers: CanaryAnswers, early: bool, late: bool) -> None:
    """At the end the measured share decides; before, only answers that are very unlikely within the limit."""
    assert bool(broken_limit(_RULES, answers, is_over=False)) == early
    assert bool(broken_limit(_RULES, answers, is_over=True)) == late


def test_the_reason_names_the_counts_the_limit_and_the_older_version() -> None:
    """So that a user sees whether the older version fails as often: limits are absolute."""
    answers = CanaryAnswers(answered=90, failed=10, others_answered=805, others_failed=95)
    assert broken_limit(_RULES, answers, is_over=False) == (
        "10 of its 100 answers failed, more than 1 %; of the older version's, 95 of 900 failed"
    )
    slow = CanaryAnswers(answered=50, slow=40)
    assert broken_limit(_RULES, slow, is_over=False) == (
        "40 of its 50 answers took more than 500 ms, which is the limit for 90 %"
    )


def test_a_limit_of_zero_allows_no_failure() -> None:
    """The first failure among enough answers breaks it at once."""
    rules = replace(_RULES, error_rate=0.0, p90_s=None)
    assert broken_limit(rules, CanaryAnswers(answered=30, failed=1), is_over=False)
    assert not broken_limit(rules, CanaryAnswers(answered=31), is_over=True)


def test_enough_answers_are_needed_for_each_limit() -> None:
    """The times of failed answers say nothing about the 90th percentile."""
    failing = CanaryAnswers(answered=LEAST_ANSWERS - 1, failed=100)
    assert not has_enough(_RULES, failing)
    assert has_enough(replace(_RULES, p90_s=None), failing)
    assert not has_enough(replace(_RULES, error_rate=None), failing)
    assert has_enough(_RULES, _GOOD)


@given(st.floats(0.001, 0.5), st.integers(0, 1000), st.data())
def test_what_breaks_a_limit_early_also_breaks_it_at_the_end(limit: float, total: int, data: st.DataObject) -> None:
    """More failures never help."""
    failed = data.draw(st.integers(0, total))
    rules = replace(_RULES, error_rate=limit, p90_s=None)
    early, late = (
        broken_limit(rules, CanaryAnswers(answered=total - failed, failed=failed), is_over=over)
        for over in (False, True)
    )
    assert bool(late) or not early
    if early and failed < total:
        assert broken_limit(rules, CanaryAnswers(answered=total - failed - 1, failed=failed + 1), is_over=False)


@pytest.mark.parametrize("limit", [0.01, 0.1])
def test_chance_ends_hardly_any_canary_early(limit: float) -> None:
    """A version that fails as often as it may is looked at after every answer, 2,000 times, and survives."""
    drawn, ended = random.Random(36), 0
    rules = replace(_RULES, error_rate=limit, p90_s=None)
    for _ in range(200):
        failed = 0
        for total in range(1, 2001):
            failed += drawn.random() < limit
            if broken_limit(rules, CanaryAnswers(answered=total - failed, failed=failed), is_over=False):
                ended += 1
                break
    assert ended <= 2


# ----------------------------------------------------------------------------------------------------------- a service


@dataclass
class _Service:
    """A service on on-demand machines. Its version 1 works, and version 2 begins as a canary."""

    target: int = 2
    rules: CanaryRules | None = _RULES
    version: int = 2
    now_s: float = 1000.0
    answers: CanaryAnswers = NO_ANSWERS
    replicas: dict[int, ReplicaFacts] = field(default_factory=dict)
    state: ServiceState | None = None

    def __post_init__(self) -> None:
        """Starts the replicas of version 1."""
        self.plan = ServicePlan(
            make_policy("on-demand", PolicySettings((), 0)), LoadAutoscaler(1.0, least=self.target, most=self.target),
            version=1, min_replicas=self.target, drain_s=30.0,
        )  # fmt: skip
        self.state = ServiceState(self.plan.policy.start(), self.plan.autoscaler.start())
        self.replicas = {n: self._replica(n, 1, Stage.READY) for n in range(self.target)}
        self.step()
        self.plan = replace(self.plan, version=self.version, canary=self.rules)

    def _replica(self, number: int, version: int, stage: Stage, replaces: int | None = None) -> ReplicaFacts:
        return ReplicaFacts(number, version, CapacityKind.ON_DEMAND, None, stage, self.now_s, replaces=replaces)

    def step(self, after_s: float = 0.0, losses: Sequence[Loss] = ()) -> ServiceDecision:
        """Decides after a time, with the state as a restarted controller reads it, and carries the decision out."""
        self.now_s += after_s
        assert self.state is not None
        state = SERVICE_STATE.validate_json(SERVICE_STATE.dump_json(self.state))
        facts = list(self.replicas.values())
        found = decide(self.plan, state, facts, losses, None, self.now_s, answers=self.answers)
        self.state = found.state
        self.replicas = {n: replace(one, was_ready=one.stage is Stage.READY) for n, one in self.replicas.items()}
        for action in found.actions:
            if isinstance(action, LaunchReplica):
                number = max(self.replicas, default=-1) + 1
                self.replicas[number] = self._replica(number, action.version, Stage.STARTING, action.replaces)
            elif isinstance(action, DrainReplica):
                self.replicas[action.number] = self.staged(action.number, Stage.DRAINING)
            else:
                del self.replicas[action.number]
        return found

    def staged(self, number: int, stage: Stage, **other: object) -> ReplicaFacts:
        """Puts a replica into a stage."""
        one = replace(self.replicas[number], stage=stage, since_s=self.now_s)
        self.replicas[number] = replace(one, **other)  # type: ignore[arg-type]
        return self.replicas[number]

    def start(self) -> None:
        """Launches the canary and makes it ready."""
        self.step()
        for one in [o for o in self.replicas.values() if o.stage is Stage.STARTING]:
            self.staged(one.number, Stage.READY)
        self.step(1.0)

    def versions(self) -> list[int]:
        """Returns the versions of the replicas that do not drain."""
        return sorted(one.version for one in self.replicas.values() if one.stage is not Stage.DRAINING)


@pytest.mark.parametrize(("target", "share", "wanted"), [(1, 0.1, 1), (2, 0.1, 1), (10, 0.3, 3), (20, 0.06, 2)])
def test_a_canary_runs_beside_the_older_version(target: int, share: float, wanted: int) -> None:
    """Its replicas are its share of the target, rounded up; no replica of the older version drains for them."""
    service = _Service(target, replace(_RULES, share=share))
    service.start()
    assert service.versions() == [1] * target + [2] * wanted
    assert service.state is not None and service.state.canary is not None
    assert service.state.canary.since_s == service.now_s
    found = service.step(10.0)
    assert (found.actions, found.notes) == ((), ("canary_runs",))
    assert found.wake_at_s == service.state.canary.since_s + _RULES.for_s


def test_a_good_canary_lets_the_update_continue() -> None:
    """Each further replica of the older version is then replaced as in any rolling update."""
    service = _Service()
    service.start()
    service.answers = _GOOD
    assert service.step(_RULES.for_s - 1).notes == ("canary_runs",)
    passed = service.step(1.0)
    assert passed.state.canary is not None and passed.state.canary.verdict is CanaryVerdict.PASSED
    assert (passed.wake_at_s, passed.actions) == (service.now_s, ())
    first = service.step()
    assert first.actions == (
        DrainReplica(0, EndCause.SUPERSEDED),
        LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, replaces=1),
    )
    service.staged(3, Stage.READY)
    assert service.step(5.0).actions == (DrainReplica(1, EndCause.SUPERSEDED),)
    assert service.versions() == [2, 2]
    assert service.state is not None and service.state.good_version == 2


def test_a_bad_canary_is_taken_back_at_once() -> None:
    """The older version keeps all its replicas, is launched from then on, and a note says what happened."""
    service = _Service()
    service.start()
    service.answers = CanaryAnswers(answered=90, failed=10)
    found = service.step(20.0)
    assert (found.actions, found.notes) == ((DrainReplica(2, EndCause.UPDATE_GIVEN_UP),), ("canary_failed",))
    assert found.state.canary is not None and found.state.canary.why.startswith("10 of its 100 answers failed")
    assert found.state.version_to_launch(2, has_canary=True) == 1
    service.step(30.0)
    lost = Loss(service.replicas.pop(0), LossKind.PREEMPTED)
    assert service.step(1.0, [lost]).actions == (LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),)
    assert service.versions() == [1, 1]


def test_a_canary_with_few_answers_waits() -> None:
    """Without traffic nothing is decided: neither after its time, nor long after it. The first answers decide."""
    service = _Service()
    service.start()
    for _ in range(3):
        found = service.step(_RULES.for_s)
        assert (found.actions, found.notes) == ((), ("canary_waits",))
    service.answers = _GOOD
    service.step(1.0)
    assert service.step().state.good_version == 2


def test_the_older_version_is_launched_while_a_canary_is_judged() -> None:
    """A lost replica of the older version is replaced by its own version, and a lost canary by another one."""
    service = _Service()
    service.start()
    old, new = service.replicas.pop(1), service.replicas.pop(2)
    found = service.step(1.0, [Loss(old, LossKind.PREEMPTED), Loss(new, LossKind.PREEMPTED)])
    launched = {(one.version, one.replaces) for one in found.actions if isinstance(one, LaunchReplica)}
    assert launched == {(1, None), (2, 0)}


def test_a_canary_whose_replicas_fail_is_taken_back() -> None:
    """Each failure is followed by a backoff of the canary only."""
    service = _Service()
    service.step()
    for failures in range(1, MOST_FAILURES + 1):
        lost = Loss(service.replicas.pop(2), LossKind.FAILED)
        found = service.step(1.0, [lost])
        assert found.actions == ()
        if failures < MOST_FAILURES:
            assert found.wake_at_s == service.now_s + 5.0 * 2 ** (failures - 1)
            assert len(service.step(found.wake_at_s - service.now_s).actions) == 1
    assert found.notes == ("canary_failed",)
    assert found.state.canary is not None and "3 of its replicas failed" in found.state.canary.why


@pytest.mark.parametrize(
    ("stage", "other", "after_s", "why"),
    [
        (Stage.UNREADY, {"is_ejected": True}, 0.0, "balancers have ejected replica 2"),
        (Stage.UNREADY, {}, 180.0, "replica 2 has not answered its probe for 180 s"),
        (Stage.STARTING, {"is_queued": True}, 1800.0, "replica 2 has waited for machines for 1800 s"),
    ],
)
def test_a_canary_that_cannot_serve_is_taken_back(
    stage: Stage, other: dict[str, object], after_s: float, why: str
) -> None:
    """Ejected by balancers, without a good probe, or without machines."""
    service = _Service()
    service.start()
    service.staged(2, stage, **other)
    if after_s:
        assert service.step(after_s - 1).actions == ()
    found = service.step(1.0)
    assert found.state.canary is not None and found.state.canary.why.startswith(why)
    assert [one.number for one in found.actions if isinstance(one, DrainReplica | EndReplica)] == [2]


def test_a_newer_update_supersedes_a_canary() -> None:
    """The replicas of the first canary drain, and the newest version is judged from the beginning."""
    service = _Service()
    service.start()
    service.plan = replace(service.plan, version=3)
    found = service.step(5.0)
    assert found.actions[0] == DrainReplica(2, EndCause.SUPERSEDED)
    assert [one.version for one in found.actions if isinstance(one, LaunchReplica)] == [3]
    assert found.state.canary is not None
    assert (found.state.canary.version, found.state.canary.since_s, found.state.good_version) == (3, None, 1)


def test_the_way_back_and_the_way_on_are_updates() -> None:
    """The older document ends the canary; the newest one without a canary replaces the older version at once."""
    back = _Service()
    back.start()
    assert back.state is not None
    back.plan, back.state = replace(back.plan, version=3), replace(back.state, good_version=3)
    for number in (0, 1):  # As `continue_replicas` moves them.
        back.replicas[number] = replace(back.replicas[number], version=3)
    found = back.step(1.0)
    assert (found.actions, found.state.canary) == ((DrainReplica(2, EndCause.SUPERSEDED),), None)
    onward = _Service()
    onward.start()
    onward.plan = replace(onward.plan, version=3, canary=None)
    onward.replicas[2] = replace(onward.replicas[2], version=3)
    assert DrainReplica(0, EndCause.SUPERSEDED) in onward.step(1.0).actions


def test_a_canary_that_serves_alone_stays_until_others_serve() -> None:
    """If the older version has gone, a bad version is better than none."""
    service = _Service(target=1)
    service.start()
    service.answers = CanaryAnswers(answered=90, failed=10)
    lost = Loss(service.replicas.pop(0), LossKind.PREEMPTED)
    found = service.step(1.0, [lost])
    assert found.actions == (LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),)
    assert found.notes == ("canary_failed",)
    service.staged(2, Stage.READY)
    assert service.step(1.0).actions == (DrainReplica(1, EndCause.UPDATE_GIVEN_UP),)


def test_an_older_version_that_fails_delays_no_repair() -> None:
    """If no replica of the older version is ready because it fails, the newest version needs no canary."""
    service = _Service(target=1)
    lost = Loss(service.replicas.pop(0), LossKind.FAILED)
    found = service.step(1.0, [lost])
    assert found.state.canary is not None and found.state.canary.verdict is CanaryVerdict.PASSED
    assert service.step().actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True),)


def test_the_first_version_has_no_canary() -> None:
    """There is nothing to go back to."""
    service = _Service(target=1)
    assert service.state is not None
    service.state = replace(service.state, good_version=0)
    service.replicas = {}
    assert service.step(1.0).actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True),)


def test_a_canary_stays_in_the_zones_of_its_version() -> None:
    """In the predecessor's zone if the version may run there, else in another of its zones, else on demand."""
    for zones, expected in (({"old", "a"}, "old"), ({"b", "a"}, "a"), (set(), None)):
        service = _Service(target=1, rules=replace(_RULES, zones=frozenset(zones)))
        service.staged(0, Stage.READY, kind=CapacityKind.SPOT, zone="old")
        launched = [one for one in service.step().actions if isinstance(one, LaunchReplica) and one.version == 2]
        assert [one.zone for one in launched] == [expected]


def test_the_time_of_a_canary_follows_a_clock_that_is_set_back() -> None:
    """It lasts no longer than its time."""
    service = _Service()
    service.start()
    service.answers = _GOOD
    service.now_s = 500.0
    assert service.step().notes == ("canary_runs",)
    service.step(_RULES.for_s)
    assert service.step().state.good_version == 2
