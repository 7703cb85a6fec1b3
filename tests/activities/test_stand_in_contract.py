"""The contract of the workflow tests' stand-in for Postgres: it answers as the real activities do."""

import random
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.protocol.workloads import NodeLaunch, ReleaseRequest, TransitionRequest
from tests.activities.world import World
from tests.depth import few
from tests.workflows.lab import Facts, launch_plan

REASON = {"code": "starting_tasks", "detail": {}}
STARTED = {"code": "starting_tasks", "detail": {"machines": 1}}
AFTER_RELEASE = (*QUEUED_PHASES, *QUEUED_PHASES, *QUEUED_PHASES, *TERMINAL_PHASES)


def _stand_in(workload: str) -> Facts:
    return Facts(workload, launch_plan(workload, [NodeLaunch("r/c/m", ["main"], {"main": [0]})], region="r"))


def _answer(of: Any, request: TransitionRequest | ReleaseRequest) -> object:
    """Returns what an activity returns, or the type of its error."""
    try:
        return of.transition(request) if isinstance(request, TransitionRequest) else of.release(request)
    except ApplicationError as error:
        return error.type


def _request(chance: random.Random, workload: str, facts: Facts) -> TransitionRequest | ReleaseRequest:
    """Draws a request for the current attempt, or sometimes for the one before it, as from a late workflow."""
    attempt = max(1, facts.attempt - (chance.random() < 0.3))
    if chance.random() < 0.6:
        phase = chance.choice(sorted(PLACED_PHASES))
        together = phase is Phase.RUNNING and facts.phase is Phase.PLACING and chance.random() < 0.5
        return TransitionRequest(workload, attempt, phase.value, REASON, STARTED if together else None)
    return ReleaseRequest(
        workload, attempt, chance.choice(sorted(AFTER_RELEASE)).value, REASON, unstarted=chance.random() < 0.3
    )


@pytest.mark.parametrize("seed", few(range(12), 3))
def test_the_stand_in_answers_as_the_activities_do(world: World, seed: int) -> None:
    """Random awards, transitions, releases, repetitions and late requests have the same answers and the same phases."""
    chance = random.Random(seed)
    world.region("r")
    world.machine("r/c/m", gpus=4)
    workload = world.submit()
    facts, last = _stand_in(workload), None
    for _ in range(40):
        if facts.phase in TERMINAL_PHASES:
            break
        if facts.phase in QUEUED_PHASES and (facts.attempt == 0 or chance.random() < 0.7):
            world.tick()
            facts.award(ready=True)
        else:
            request = last if last is not None and chance.random() < 0.2 else _request(chance, workload, facts)
            assert _answer(world.workloads, request) == _answer(facts, request), (request, facts.path)
            last = request
        row = world.workload(workload)
        assert (row.phase, row.attempt) == (facts.phase.value, facts.attempt), facts.path
