"""Elastic workloads in the simulator: the work is divided by the number of tasks; each attempt has its own number."""

from dataclasses import replace
from math import inf

import pytest

from tests.simulation.scenarios import elastic, happenings, machines, scenario, tenant, when, workload


def test_more_tasks_need_less_time() -> None:
    """A workload of 1,000 s with 2 tasks takes 250 s with 8, and holds all 8 slots meanwhile."""
    run, seen = happenings(scenario(machines("east", 1), [elastic(workload("w", 2), 20)]))
    assert when(seen, "finished")["w"] == 250
    assert run.meter.total.held_gpu_s == 8 * 250


def test_it_continues_with_what_an_evictor_leaves() -> None:
    """Evicted after 100 s with 8 tasks, it continues at once with the 3 that are left of the slots.

    It has 2,000 GPU seconds to do, of which 800 are done: 400 s are left with 3 tasks.
    """
    tenants = [tenant("vision", a100=1000), tenant("nlp", level=1, a100=1000)]
    work = [elastic(workload("w", 2, level=4), 20), workload("urgent", 5, 100, 5000, 1, "nlp")]
    seen = happenings(scenario(machines("east", 1), work, tenants, until_s=3000.0))[1]
    assert when(seen, "evicted") == {"w": 100}
    began = when(seen, "started")["w"]
    assert when(seen, "finished")["w"] - began == 400


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_victim_keeps_a_part_of_its_slots(shrinks: bool) -> None:
    """With the rule, it has the 3 slots that are left when it has saved, and another one of its rank waits for its end.

    With 8 tasks it does 800 GPU seconds in the first 100 s; the rest of 2,000 takes 400 s with 3 tasks.
    """
    tenants = [tenant("vision", a100=0), tenant("nlp", level=1, a100=1000)]
    low = workload("low", 3, 50, 50_000, 4)
    work = [elastic(workload("w", 2, level=4), 20), low, workload("urgent", 5, 100, 5000, 1, "nlp")]
    scene = scenario(machines("east", 1), work, tenants, until_s=3000.0)
    scene = replace(scene, settings=scene.settings.model_copy(update={"shrink": shrinks}))
    seen = happenings(scene)[1]
    assert when(seen, "evicted") == {"w": 100}
    if shrinks:
        assert when(seen, "shrunk") == {"w": 110} and when(seen, "awarded")["low"] >= when(seen, "finished")["w"]
        assert when(seen, "finished")["w"] - when(seen, "started")["w"] == 400
    else:
        assert when(seen, "shrunk") == {}


def test_the_quota_limits_the_tasks() -> None:
    """With a quota of 4, it has 4 tasks of at most 20, though 8 slots are free."""
    seen = happenings(scenario(machines("east", 1), [elastic(workload("w", 2), 20)], [tenant("vision", a100=4)]))[1]
    assert when(seen, "finished")["w"] == 500


def test_it_grows_into_what_becomes_free() -> None:
    """It starts with 3 tasks beside another workload. When that ends at 4,000 s, it continues with 8 tasks.

    After 12,000 of 40,000 GPU seconds, it stops within 10 s, and works on with 8 tasks: 3,500 s.
    """
    work = [workload("small", 5, 0, 4000, 1), elastic(workload("w", 2, 1, 20_000), 20)]
    run, seen = happenings(scenario(machines("east", 1), work))
    started = [one.at_s for one in seen if (one.what, one.workload) == ("started", "w")]
    assert len(started) == 2 and 4000 <= started[1] <= 4015
    done = 3 * (started[1] - 10 - started[0])
    assert abs(when(seen, "finished")["w"] - (started[1] + (40_000 - done) / 8)) < 1
    assert run.meter.total.growths == 1


def test_it_does_not_grow_shortly_before_its_end() -> None:
    """If the rest of its maximum runtime is too short for the restart to pay, it stays as it is."""
    work = [workload("small", 5, 0, 4000, 1), replace(elastic(workload("w", 2, 1, 8000), 20), max_runtime_s=4400)]
    run, _ = happenings(scenario(machines("east", 1), work))
    assert run.meter.total.growths == 0


@pytest.mark.parametrize(("max_runtime_s", "growths"), [(7200, 0), (inf, 1)])
def test_the_runtime_of_earlier_attempts_counts(max_runtime_s: float, growths: int) -> None:
    """It runs for 5,010 s before its eviction, so at 9,010 s its maximum runtime of 7,200 s is too short for growth."""
    low = replace(elastic(workload("low", 2, level=4, duration_s=60_000), 20), max_runtime_s=max_runtime_s)
    tenants = [tenant("vision", a100=1000), tenant("nlp", level=1, a100=1000)]
    work = [low, workload("urgent", 5, 5000, 4000, 1, "nlp")]
    run, seen = happenings(scenario(machines("east", 1), work, tenants, until_s=10_000.0))
    assert when(seen, "evicted") == {"low": 5000} and when(seen, "finished") == {"urgent": 9010}
    assert run.meter.total.growths == growths


def test_it_leaves_room_for_what_waits() -> None:
    """What becomes free goes to a waiting workload, not to the growth of a more important one."""
    work = [
        workload("small", 5, 0, 4000, 1),
        elastic(workload("w", 2, 1, 20_000), 20),
        workload("waits", 5, 10, 50_000, 7),
    ]
    run, seen = happenings(scenario(machines("east", 1), work, until_s=20_000.0))
    assert 4000 <= when(seen, "awarded")["waits"] <= 4002
    assert run.meter.total.growths == 0


def test_workloads_that_grow_share_the_quota() -> None:
    """Two workloads of a tenant with a quota of 6 have 2 tasks each; when enough is free for both, only one grows."""
    work = []
    for k, region in enumerate(("east", "west")):
        small = workload(f"small{k}", 6, 0, 4000, 1, "nlp", regions=frozenset({region}))
        work += [small, elastic(workload(f"w{k}", 1, 1 + k, 50_000, regions=frozenset({region})), 8)]
    tenants = [tenant("nlp", a100=1000), tenant("vision", a100=6)]
    run, _ = happenings(scenario([*machines("east", 1), *machines("west", 1)], work, tenants, until_s=8000.0))
    assert run.meter.total.growths == 1
