"""Checkpoints that cannot be loaded: tried again once, and then the workload is stopped."""

import pytest

from domain.phases import Phase
from domain.protocol import Activity, MailKind
from domain.reported import LoadReport, NoticeReport, TaskProgress
from lifecycle.loading import failed_load, loaded
from tests.workflows.lab import Life
from tests.workflows.stories import goes
from tests.workflows.test_running import AGAIN, EVICTED, RUNNING, running

UNLOADABLE = "pending checkpoint_unloadable"
STOPPED = "failed checkpoint_unloadable"


async def fails_to_load(life: Life, load: LoadReport, exit_code: int = 1) -> None:
    """Runs, and ends by an error after such a report of its first task."""
    await running(life)
    life.agents[0].reports(load=load)
    life.agents[1].reports(load=LoadReport("loaded"))
    life.agents[0].ends(exit_code)


@goes(*RUNNING, UNLOADABLE, *AGAIN, STOPPED)
async def test_a_workload_whose_checkpoint_does_not_load_twice_is_stopped(life: Life) -> None:
    """The second failure in a row ends it, with the words of the error; the first one costs none of its retries."""
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
    """A task that began to load and ended by an error, such as memory that ran out, could not load."""
    await fails_to_load(life, LoadReport("started"))
    await life.reaches(Phase.PENDING)
    await fails_to_load(life, LoadReport("started"), 137)
    assert await life.result() == "failed"
    assert life.reason()["error"] == "the task ended with exit code 137 during the load"


@goes(*RUNNING, UNLOADABLE, *AGAIN, "pending task_failed", *AGAIN, UNLOADABLE, *AGAIN, STOPPED)
async def test_a_load_that_succeeds_begins_the_row_anew(life: Life) -> None:
    """Two failures count only in a row."""
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
    """An attempt that was stopped while it loaded neither fails nor ends the row."""
    await fails_to_load(life, LoadReport("failed", "OSError: timed out"))
    await life.reaches(Phase.PENDING)
    await running(life)
    life.agents[0].reports(load=LoadReport("started"))
    await life.mail(MailKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await fails_to_load(life, LoadReport("failed", "OSError: timed out"))
    assert await life.result() == "failed"


@goes(*RUNNING, "preempted platform_notice", *AGAIN, UNLOADABLE)
async def test_a_platform_that_takes_the_machine_during_a_load_does_not_count(life: Life) -> None:
    """Tasks that ended by their platform's notice while they loaded did not fail to load."""
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
    """The first task whose load failed is named; one that was stopped for a peer's failure is not."""
    progress = [TaskProgress("main", task, load=load) for task, load in enumerate(reports)]
    found = failed_load(reversed(progress), failed, "exit code 1")
    assert (found.task if found else None) == culprit
    assert loaded(progress) is any(r is not None and r.state in ("loaded", "none") for r in reports)
