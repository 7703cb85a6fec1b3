"""If a checkpoint cannot be loaded, the workload is tried once more and then fails."""

import pytest

from domain.lifecycle.checkpoint_load import failed_load, loaded
from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.workload_messages import MessageKind
from domain.task_reports import LoadReport, NoticeReport, TaskProgress
from tests.workflows.lab import Life
from tests.workflows.running import AGAIN, EVICTED, RUNNING, running
from tests.workflows.stories import goes

UNLOADABLE = "pending checkpoint_unloadable"
STOPPED = "failed checkpoint_unloadable"


async def fails_to_load(life: Life, load: LoadReport, exit_code: int = 1) -> None:
    """Runs the workload; its first task reports `load` and then exits with an error."""
    await running(life)
    life.agents[0].reports(load=load)
    life.agents[1].reports(load=LoadReport("loaded"))
    life.agents[0].ends(exit_code)


@goes(*RUNNING, UNLOADABLE, *AGAIN, STOPPED)
async def test_a_workload_whose_checkpoint_does_not_load_twice_is_stopped(life: Life) -> None:
    """The second consecutive load failure ends the workload with the error's text; the first uses up no retry."""
    life.plan.retries = 0
    broken = LoadReport("failed", "ValueError: part model: bad checksum", 2)
    await fails_to_load(life, broken)
    await life.reaches(Phase.PENDING)
    assert life.reason()["failures"] == 1
    await fails_to_load(life, broken)
    assert await life.result() == "failed"
    assert life.reason() == {
        "task": "main/0",
        "error": "ValueError: part model: bad checksum",
        "skipped": 2,
        "failures": 2,
        "limit": 2,
    }


@goes(*RUNNING, UNLOADABLE, *AGAIN, STOPPED)
async def test_an_error_in_the_middle_of_a_load_is_a_load_that_failed(life: Life) -> None:
    """A task that ends by an error during its load, for example out of memory, counts as a failed load."""
    await fails_to_load(life, LoadReport("started"))
    await life.reaches(Phase.PENDING)
    await fails_to_load(life, LoadReport("started"), 137)
    assert await life.result() == "failed"
    assert life.reason()["error"] == "the task ended with exit code 137 during the load"


@goes(*RUNNING, UNLOADABLE, *AGAIN, "pending task_failed", *AGAIN, UNLOADABLE, *AGAIN, STOPPED)
async def test_a_load_that_succeeds_begins_the_row_anew(life: Life) -> None:
    """Only consecutive load failures count; a successful load resets the count."""
    await fails_to_load(life, LoadReport("failed", "OSError: timed out"))
    await life.reaches(Phase.PENDING)
    await fails_to_load(life, LoadReport("loaded"))
    await life.reaches(Phase.PENDING)
    await fails_to_load(life, LoadReport("failed", "OSError: timed out"))
    await life.reaches(Phase.PENDING)
    await fails_to_load(life, LoadReport("none", None, 3))
    assert await life.result() == "failed"
    assert life.reason()["error"] == "no valid checkpoint is left: 3 skipped"


@goes(*RUNNING, UNLOADABLE, *AGAIN, *EVICTED, *AGAIN, STOPPED)
async def test_a_preemption_during_a_load_does_not_count(life: Life) -> None:
    """An attempt that was stopped during its load neither counts as a load failure nor resets the count."""
    await fails_to_load(life, LoadReport("failed", "OSError: timed out"))
    await life.reaches(Phase.PENDING)
    await running(life)
    life.agents[0].reports(load=LoadReport("started"))
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await fails_to_load(life, LoadReport("failed", "OSError: timed out"))
    assert await life.result() == "failed"


@goes(*RUNNING, "preempted platform_notice", *AGAIN, UNLOADABLE)
async def test_a_platform_that_takes_the_machine_during_a_load_does_not_count(life: Life) -> None:
    """Tasks that end by a platform notice during their load do not count as a load failure."""
    life.plan.retries = 0
    await running(life)
    life.agents[1].reports(load=LoadReport("loaded"))
    life.agents[1].ends()
    await life.pending(Activity.RUN_NODE, 1)
    life.agents[0].reports(load=LoadReport("started"))
    life.agents[0].ends(1, notice=NoticeReport("gcp", "preempt", True, 5.0))
    await life.reaches(Phase.PREEMPTED)
    await fails_to_load(life, LoadReport("started"))
    await life.reaches(Phase.PENDING)
    assert life.reason()["failures"] == 1


@pytest.mark.parametrize(
    ("reports", "failed", "culprit"),
    [
        ([LoadReport("loaded"), LoadReport("started")], "main/0", None),
        ([LoadReport("loaded"), LoadReport("started")], "main/1", "main/1"),
        ([LoadReport("started"), LoadReport("failed", "x")], None, "main/1"),
        ([LoadReport("none"), None], "main/0", None),
        ([LoadReport("none", None, 1), LoadReport("failed", "x")], None, "main/0"),
        ([LoadReport("started"), LoadReport("started")], None, None),
        ([None, None], "main/0", None),
    ],
)
def test_whose_load_failed(reports: list[LoadReport | None], failed: str | None, culprit: str | None) -> None:
    """The first task whose load failed is named; a task that was stopped because of another task is not."""
    progress = [TaskProgress("main", task, load=load) for task, load in enumerate(reports)]
    found = failed_load(reversed(progress), failed, "exit code 1")
    assert (found.task if found else None) == culprit
    assert loaded(progress) is any(r is not None and r.state in ("loaded", "none") for r in reports)
