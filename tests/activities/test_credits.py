"""What work on lent machines earns: checkpoints that are in the store, whatever agents report."""

import time

from activities.lifecycle.credits import Credits
from domain.ids import checkpoint_prefix
from domain.phases import Phase
from domain.protocol.workloads import StageRequest
from domain.task_reports import TaskProgress
from infra.db.models import Cluster
from mizzen.checkpoint import Checkpointer
from tests.activities.world import World, job


def _lent(world: World, tasks: int = 1) -> str:
    """Returns a workload that runs on lent machines."""
    world.alter(Cluster, ("r", "c"), capacity="voluntary")
    workload = world.submit(job(tasks=tasks, gpus=4), capacity=("voluntary",))
    assert world.tick().awarded == 1
    world.launch.stage(StageRequest(workload, 1))
    world.run(workload, 600)
    return workload


async def test_only_checkpoints_in_the_store_are_evidence(world: World) -> None:
    """A reported checkpoint that is not there earns nothing; one that is there counts up to its commit."""
    bucket = world.region("r")
    world.machine("r/c/m")
    workload = _lent(world)
    looking = Credits(world.engine, world.settings)
    world.saved(workload, 0)
    await looking.round()
    assert world.attempt(workload).earned is None
    before_s = time.time()
    Checkpointer(bucket.uri(checkpoint_prefix(workload)), attempt=1).save(1, {"step": 1})
    await looking.round()
    earned = world.attempt(workload).earned
    assert earned is not None and earned["checkpoint"][0] == 1
    assert before_s <= earned["checkpoint"][1] <= time.time()
    Checkpointer(bucket.uri(checkpoint_prefix(workload)), attempt=2).save(9, {"step": 9})
    world.alter(type(world.attempt(workload)), (workload, 1), checkpoint_step=9)
    await looking.round()
    assert world.attempt(workload).earned == earned, "it is the checkpoint of another attempt"


async def test_steps_are_evidence_if_two_machines_report_them(world: World) -> None:
    """At the end of an attempt, the steps that tasks on both machines have reported count for both."""
    world.region("r")
    world.machine("r/c/m1")
    world.machine("r/c/m2")
    alone = _lent(world, 2)
    world.release(alone, Phase.FAILED, progress=[TaskProgress("main", 0, step=10**6)])
    assert world.attempt(alone).earned is None
    both = _lent(world, 2)
    told = [TaskProgress("main", 0, step=10**6), TaskProgress("main", 1, step=8)]
    world.release(both, Phase.SUCCEEDED, progress=told)
    earned = world.attempt(both).earned
    assert earned is not None and {m: step for m, (step, _) in earned["steps"].items()} == {"r/c/m1": 8, "r/c/m2": 8}
