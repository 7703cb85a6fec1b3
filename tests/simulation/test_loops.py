"""Evictions never form a loop, and immunity ends as soon as it is no longer needed."""

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from simulation import passes
from simulation.policies import POLICIES
from simulation.run import Run, Scenario
from simulation.simulator import RunProgress
from simulation.transitions import Happened
from simulation.workloads import SimulatedWorkload
from tests.simulation.scenarios import SURE, elastic, happenings, machines, scenario, tenant, when, workload

BLOCK = 20
"""Random rounds of one case; `make test-all` runs 500 cases."""
TENANTS = ("nlp", "speech", "vision")


PLACES = ("east", "north", "west")
PATIENT = SURE.model_copy(update={"min_runtime_s": 100.0, "full_scan_s": 50.0})


def _restless(seed: int) -> Scenario:
    """Returns small machines, small quotas, and workloads of two minutes, the less important ones mostly first.

    Later, protection ends and evicted workloads return, so awards and ranks change without new submissions.
    """
    chance = random.Random(seed)
    states = [m for place in PLACES for m in machines(place, 1, gpus=chance.choice((2, 4, 8)))]
    tenants = [tenant(name, chance.choice((1, 1, 3)), a100=chance.randint(2, 12)) for name in TENANTS]
    work = []
    for k in range(chance.randint(6, 14)):
        level = chance.choice((1, 2, 2, 4, 5, 7))
        submit_s = chance.choice((0, 40, 80) if level > 2 else (0, 60, 120))
        regions = frozenset({chance.choice(PLACES)}) if chance.random() < 0.8 else None
        gpus, duration_s = chance.randint(1, 8), chance.choice((500, 5000, 5000))
        one = workload(f"w{k}", gpus, submit_s, duration_s, level, chance.choice(TENANTS), regions=regions)
        if chance.random() < 0.4:
            one = elastic(one, gpus + chance.choice((1, 3, 11)))
        limit_s = duration_s * chance.choice((1, 2, inf))
        work.append(replace(one, user=chance.choice(("ann", "bob", "cleo")), max_runtime_s=limit_s))
    changed = {"min_runtime_s": float(chance.choice((0, 30, 100))), "shrink": bool(seed % 2)}
    settings = PATIENT.model_copy(update=changed)
    return scenario(states, work, tenants, settings, seed=seed, until_s=1200.0)


def _changing(seed: int) -> list[Happened]:
    """Runs a round in which, at random times, a tenant gets another level or quota, as live at once; returns events.

    In every fourth round, changes are frequent, so that a block of rounds has evictions after changes.
    """
    seen: list[Happened] = []
    often = 0.1 if seed % 4 else 0.4
    chance, simulator = random.Random(seed), Run(_restless(seed), POLICIES["global"], follow=seen.append).simulator
    shares = simulator.transitions.shares

    def change(progress: RunProgress) -> bool:
        if chance.random() < often:
            name = chance.choice(TENANTS)
            shares._tenants[name] = tenant(name, chance.choice((1, 2, 5)), a100=chance.randint(0, 14))
            simulator.transitions.evictors.clear()
            simulator.transitions.engine.set_tenants(shares.tenants(progress.now_s))
            simulator._passes.news = True
            seen.append(Happened(progress.now_s, "changed", name))
        return False

    simulator.run(change, every=1)
    return seen


def _loops(seen: list[Happened]) -> list[tuple[float, str, str]]:
    """Returns (time, evictor, victim) of evictions whose victim had caused, directly or by a chain, one of the evictor.

    A submission, an end, or a change of a tenant starts a new count.
    """
    victims: dict[str, set[str]] = defaultdict(set)
    out = []
    for one in seen:
        if one.what in ("submitted", "finished", "changed"):
            victims.clear()
        elif one.what == "evicted":
            (evictor,) = one.detail
            reached, left = {one.workload}, [one.workload]
            while left:
                left += (more := victims[left.pop()] - reached)
                reached |= more
            if evictor in reached:
                out.append((one.at_s, str(evictor), one.workload))
            victims[str(evictor)].add(one.workload)
    return out


@pytest.mark.parametrize("block", [0, *(pytest.param(k, marks=pytest.mark.long) for k in range(1, 500))])
def test_no_preemption_loops(block: int) -> None:
    """In random rounds, no chain of evictions returns to its first evictor without one of these between: a submission,
    an end, a change of a level or a quota. People and limits of runtimes change the order, and close no loop, nor do
    elastic workloads, whose sizes change and which shrink in every second round.
    """
    evictions = after_changes = 0
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        seen = _changing(seed)
        assert _loops(seen) == [], f"seed {seed}"
        what = [one.what for one in seen if one.what in ("changed", "submitted", "evicted")]
        evictions += what.count("evicted")
        after_changes += sum(pair == ("changed", "evicted") for pair in pairwise(what))
    assert evictions > BLOCK // 3 and after_changes


def test_a_former_victim_outranks_its_evictor_in_the_end() -> None:
    """A workload that was evicted as over-quota evicts its evictor as soon as it is within quota and outranks it."""
    east, west = frozenset({"east"}), frozenset({"west"})
    work = [
        workload("uses-quota", level=1, duration_s=1000, regions=west),
        workload("important", level=1, submit_s=1, duration_s=500, regions=east),
        workload("low", level=7, submit_s=100, duration_s=360_000, regions=east, tenant="nlp"),
    ]
    tenants = [tenant("vision", a100=8), tenant("nlp", a100=8)]
    seen = happenings(scenario(machines("east", 1) + machines("west", 1), work, tenants))[1]
    assert when(seen, "evicted") == {"important": 100, "low": 1000}
    assert when(seen, "awarded")["important"] == 1000


def _unsettled(*more: SimulatedWorkload) -> Scenario:
    """`a` evicts `b`; then `z`, which has waited for that, evicts `y`; so `x` takes the quota that `a` was within.

    `b` and `y` are protected at first, so all of this happens after the last submission.
    """
    one, two, three = (frozenset({place}) for place in PLACES)
    work = [
        workload("b", 2, 0, 5000, 7, "nlp", regions=two),
        workload("y", 8, 40, 5000, 2, "vision", regions=one),
        workload("x", 9, 45, 5000, 2, "vision", regions=three),
        workload("a", 2, 50, 5000, 5, "vision", regions=two),
        workload("z", 8, 60, 5000, 1, "speech", regions=one),
        *more,
    ]
    tenants = [tenant("nlp", a100=2), tenant("speech", a100=8), tenant("vision", a100=10)]
    states = machines("east", 1) + machines("north", 1, gpus=2) + machines("west", 1, gpus=9)
    return scenario(states, work, tenants, PATIENT, until_s=2000.0)


def test_a_loop_that_ranks_allow_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`b` now outranks its evictor `a`, but does not evict it before the next submission; without immunity it would."""
    seen = happenings(_unsettled())[1]
    assert set(when(seen, "evicted")) == {"b", "y"} and _loops(seen) == []
    late = workload("late", 1, 1000, level=7, tenant="nlp", regions=frozenset({"east"}))
    seen = happenings(_unsettled(late))[1]
    assert when(seen, "evicted")["a"] == 1000 and _loops(seen) == []
    monkeypatch.setattr(passes, "immune_to", lambda workload, evictors: frozenset())
    ((_, evictor, victim),) = _loops(happenings(_unsettled())[1])
    assert (evictor, victim) == ("b", "a")
