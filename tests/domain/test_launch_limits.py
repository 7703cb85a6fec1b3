"""The limit of launches on lent machines, and what earns time there."""

import json
from random import Random

from domain.lifecycle.credit import Earned
from domain.lifecycle.launch_limits import LEAST_LAUNCHES, LONGEST_S, launch_limit_s


def test_the_limit_follows_what_launches_take_elsewhere() -> None:
    """It has a floor and a cap, allows for the archive, and doubles each time that the workload has reached it."""
    assert launch_limit_s([1.0] * (LEAST_LAUNCHES - 1), 60) == LONGEST_S
    assert launch_limit_s([1.0] * 50, 60) == 60
    assert launch_limit_s([20.0] * 50, 60) == 100
    assert launch_limit_s([1.0] * 50, 60, archive_bytes=30_000_000) == 90
    assert [launch_limit_s([1.0] * 50, 60, timeouts=n) for n in (1, 2, 3, 4, 10_000)] == [120, 240, 480, 600, 600]
    assert launch_limit_s([500.0] * 50, 60) == LONGEST_S


def test_a_few_slow_machines_do_not_raise_the_limit() -> None:
    """A tenth of the launches may take any time."""
    for seed in range(50):
        took_s = [1.0] * 46 + [599.0] * 4
        Random(seed).shuffle(took_s)
        assert launch_limit_s(took_s, 60) == 60


def test_steps_earn_time_only_if_another_machine_reports_them() -> None:
    """Whatever one machine reports: it earns time up to the step that others have reached, and that is new."""
    earned = Earned().with_steps({"liar": 10**9}, None, 5.0)
    assert earned == Earned()
    earned = earned.with_steps({"liar": 10**9, "m1": 3, "m2": 4}, None, 6.0)
    assert earned.steps == {"liar": (4, 6.0), "m1": (3, 6.0), "m2": (4, 6.0)}
    assert earned.with_steps({"liar": 10**9, "m1": 3, "m2": 4}, None, 60.0) == earned, "no new step"
    assert earned.with_steps({"liar": 10**10}, None, 60.0) == earned, "the others have ended"
    assert Earned().with_steps({"m1": 7, "m2": 7}, 7, 6.0) == Earned(), "nothing was done since the checkpoint"


def test_evidence_is_stored_as_json() -> None:
    """What is read equals what was written, and a checkpoint counts once, at its first time."""
    earned = Earned().with_steps({"m1": 3, "m2": 4}, 2, 6.0).with_checkpoint(3, 9.0)
    assert Earned.of(json.loads(json.dumps(earned.to_json()))) == earned
    assert earned.with_checkpoint(3, 90.0).with_checkpoint(2, 90.0) == earned
    assert Earned.of(None) == Earned()
