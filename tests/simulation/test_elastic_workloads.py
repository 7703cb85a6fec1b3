"""Elastic workloads in the simulator: the work is divided by the number of tasks; each attempt has its own number."""

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


def test_the_quota_limits_the_tasks() -> None:
    """With a quota of 4, it has 4 tasks of at most 20, though 8 slots are free."""
    seen = happenings(scenario(machines("east", 1), [elastic(workload("w", 2), 20)], [tenant("vision", a100=4)]))[1]
    assert when(seen, "finished")["w"] == 500
