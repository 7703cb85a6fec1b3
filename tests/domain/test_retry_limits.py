"""Retries by exit status, against a plain count; statuses as a shell has them."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from domain.lifecycle.endings import FailureCounts, judge
from domain.lifecycle.gangs import TaskFailure
from domain.lifecycle.retry_limits import exit_status
from domain.phases import Phase
from tests.domain.test_endings import FAILED, PLAN, case


@pytest.mark.parametrize(
    ("status", "shown"), [("exit code 3", "3"), ("signal 9", "137"), ("an unknown status", "an unknown status")]
)
def test_statuses_are_those_of_a_shell(status: str, shown: str) -> None:
    assert exit_status(status) == shown


@pytest.mark.parametrize("seed", range(200))
def test_limits_by_exit_status(seed: int) -> None:
    """A failure is final exactly if more failures have counted for its limit than the limit allows."""
    chance = random.Random(seed)
    statuses = ["exit code 1", "exit code 2", "exit code 137", "signal 9", "signal 15", "an unknown status"]
    named = {s: chance.choice([0, 1, 3, None]) for s in chance.sample(["1", "137", "143"], chance.randrange(4))}
    plan = replace(PLAN, retries=chance.choice([0, 2, None]), retries_by_exit=named)
    counts, plain = FailureCounts(), Counter[str | None]()
    for _ in range(12):
        status = chance.choice(statuses)
        of = case(replace(FAILED, first_failure=TaskFailure("main/2", status)), plan=plan, counts=counts)
        ending, counts = judge(of)
        key = exit_status(status) if exit_status(status) in named else None
        limit = plan.retries if key is None else named[key]
        plain[key] += 1
        assert (ending.phase is Phase.FAILED) == (limit is not None and plain[key] > limit)
        if ending.phase is Phase.FAILED:
            assert (ending.reason.detail["retries"], ending.reason.detail.get("exit")) == (limit, key)
            break
        assert ending.reason.detail["failures"] == plain[key]
