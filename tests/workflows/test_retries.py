"""Retries by cause: exit statuses, preemptions and lost machines each have limits of their own."""

from domain.phases import Phase
from domain.protocol.workload_messages import MessageKind
from domain.protocol.workloads import WorkloadInput
from tests.workflows.agents import until
from tests.workflows.lab import Life
from tests.workflows.running import AGAIN, EVICTED, RUNNING, ends_well, running
from tests.workflows.stories import goes

FAILED = ("pending task_failed", *AGAIN)


async def fails(life: Life, exit_code: int | None, signal: int | None = None) -> None:
    """Ends a task of the running gang, and waits until the attempt is released."""
    await running(life)
    life.agents[0].ends(exit_code, signal=signal)
    await until(lambda: len(life.facts.releases) == life.facts.attempt, "the attempt is released")


@goes(*RUNNING, *FAILED, *FAILED, *FAILED, "failed retries_exhausted")
async def test_each_exit_status_has_its_own_limit(life: Life) -> None:
    """A status with a limit does not use up the retries of the others; the reason names the status and the limit."""
    life.plan.retries, life.plan.retries_by_exit = 1, {"137": 2}
    await fails(life, None, signal=9)
    assert (life.reason()["exit"], life.reason()["failures"], life.reason()["retries"]) == ("137", 1, 2)
    await fails(life, 1)
    assert "exit" not in life.reason() and (life.reason()["failures"], life.reason()["retries"]) == (1, 1)
    await fails(life, 137)
    await fails(life, None, signal=9)
    assert await life.result() == "failed"
    assert (life.reason()["exit"], life.reason()["retries"]) == ("137", 2)


@goes(*RUNNING, "failed retries_exhausted")
async def test_a_status_that_is_never_retried(life: Life) -> None:
    """A limit of 0 ends the workload at once, although other statuses are retried without limit."""
    life.plan.retries, life.plan.retries_by_exit = None, {"2": 0}
    await fails(life, 2)
    assert await life.result() == "failed"


@goes(*RUNNING, *EVICTED, *AGAIN, "checkpointing evicted", "failed restarts_exhausted")
async def test_the_limit_of_preemptions(unborn: Life) -> None:
    """After as many preemptions as the document allows, one more ends the workload, with the cause in its reason."""
    await unborn.begins(WorkloadInput(unborn.id, max_preemptions=1))
    for phase in (Phase.PREEMPTED, Phase.FAILED):
        await running(unborn)
        await unborn.mail(MessageKind.EVICT, evictor="wl-e", evictor_rank=1, rank=3)
        await unborn.reaches(phase)
    assert await unborn.result() == "failed"
    reason = unborn.reason()
    assert (reason["cause"], reason["limit"], reason["retries"]) == ("evicted", "preempted", 1)
    assert reason["words"] == "evicted by wl-e (rank 1 against 3)"


@goes(*RUNNING, "checkpointing machine_lost", "failed restarts_exhausted")
async def test_the_limit_of_lost_machines(unborn: Life) -> None:
    """A replaced workflow knows the losses of earlier attempts. The machine is blamed as for other losses."""
    await unborn.begins(WorkloadInput(unborn.id, losses=2, max_losses=2))
    await running(unborn)
    await unborn.mail(MessageKind.MACHINE_LOST, machine=unborn.agents[1].machine)
    assert await unborn.result() == "failed"
    assert (unborn.reason()["cause"], unborn.reason()["limit"]) == ("machine_lost", "lost")
    assert [r.blames_machine for r in unborn.facts.releases] == [unborn.agents[1].machine]


@goes(*RUNNING, *EVICTED, *AGAIN, "succeeded completed")
async def test_a_success_after_the_last_allowed_preemption(unborn: Life) -> None:
    """The limit of preemptions ends nothing that ends by itself."""
    await unborn.begins(WorkloadInput(unborn.id, max_preemptions=1))
    await running(unborn)
    await unborn.mail(MessageKind.EVICT, evictor="wl-e", evictor_rank=1, rank=3)
    await unborn.reaches(Phase.PREEMPTED)
    await running(unborn)
    await ends_well(unborn)
