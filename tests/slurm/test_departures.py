"""Gangs on pilots that Slurm ends: they save before, and go on elsewhere, with the reason in `why`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.site import SlurmSite, site
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(500)]


@pytest.fixture
def there(tmp_path: Path) -> Iterator[SlurmSite]:
    """A site with a pool that grows in the partition `batch`."""
    with site(tmp_path) as made:
        made.start()
        made.pool(size=0, max_size=4, idle_s=5, zones=["batch"])
        yield made


def _running(there: SlurmSite, name: str, tasks: int, gate: Path) -> str:
    workload = there.up.submit(name, 100_000, 0.1, tasks=tasks, gate=gate)
    wait_until(lambda: there.up.phase(workload) == "running", "it runs")
    wait_until(lambda: there.up.saved_step(workload) is not None, "it has saved")
    return workload


def _noticed(there: SlurmSite, workload: str) -> dict[str, Any]:
    """Waits until a workload has notice; returns its reason."""

    def found() -> Any:
        reasons = [one["reason"] for one in there.up.client().events(workload=workload)]
        return next((one for one in reasons if one is not None and one["code"] == "platform_notice"), None)

    reason: dict[str, Any] = wait_until(found, "it has notice", 150)
    return reason


def _gone(there: SlurmSite) -> list[str]:
    return [one["reason"]["sentence"] for one in there.instances(gone=True) if one["phase"] == "gone"]


def test_a_higher_partition_preempts(there: SlurmSite, tmp_path: Path) -> None:
    """A preempted pilot has the grace of its partition, its gang saves in it, and goes on from there elsewhere."""
    workload = _running(there, "gang", 3, tmp_path / "gate")
    there.slurm.command(
        "sbatch", "--partition=urgent", "--nodes=1", "--exclusive", "--chdir=/", "--output=/dev/null", "--wrap=sleep 20"
    )
    began_s = time.time()
    notice = _noticed(there, workload)
    assert notice["detail"]["notice"] == "preempt"
    assert notice["detail"]["ends_at_s"] == pytest.approx(began_s + 20, abs=12)
    wait_until(lambda: _runs_again(there, workload), "it runs again", 150)
    assert int(there.up.client().workload(workload)["progress"]["step"]) > 0
    assert any("preempt" in sentence for sentence in _gone(there))


def _runs_again(there: SlurmSite, workload: str) -> bool:
    return there.up.phase(workload) == "running" and _attempt(there, workload) > 1


def _attempt(there: SlurmSite, workload: str) -> int:
    return max(int(one["attempt"]) for one in there.up.client().allocations(workload))


def test_a_cancelled_job_and_a_drained_node(there: SlurmSite, tmp_path: Path) -> None:
    """`scancel` and a drained node end their instances with the reason; the workload goes on elsewhere."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    ((job,),) = there.slurm.jobs().values()
    there.slurm.command("scancel", job)
    wait_until(lambda: _runs_again(there, workload), "it runs again", 150)
    wait_until(lambda: any("scancel" in one or "SIGTERM" in one for one in _gone(there)), "the instance has the reason")
    (node,) = there.slurm.command("squeue", "-h", "-t", "running", "-o", "%N").splitlines()
    there.slurm.command("scontrol", "update", f"nodename={node}", "state=drain", "reason=fix its fan")
    wait_until(lambda: _attempt(there, workload) > 2, "it has left the node", 120)
    wait_until(lambda: any("fix its fan" in sentence for sentence in _gone(there)), "the instance has the reason", 60)


def test_the_controller_is_away(there: SlurmSite, tmp_path: Path) -> None:
    """While slurmctld is dead, gangs run on, and nothing is lost or submitted; then the pool grows for what waits."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    before = there.slurm.jobs()
    there.slurm.kill("slurmctld")
    other = there.up.submit("two", 10, 0.1, tasks=2)
    time.sleep(25)
    assert there.up.phase(workload) == "running"
    there.slurm.start_controller()
    wait_until(lambda: there.up.ended(other), "the other one has run", 150)
    jobs = there.slurm.jobs()
    assert before.items() <= jobs.items()
    assert all(len(numbers) == 1 for numbers in jobs.values())
    assert _attempt(there, workload) == 1


def test_a_time_limit(tmp_path: Path) -> None:
    """A gang saves before the time limit of its pilot, and goes on on another pilot."""
    with site(tmp_path, partitions={"batch": {"time_s": 120}}, leave_s=60) as there:
        there.start()
        there.pool(size=0, max_size=2, idle_s=5)
        workload = _running(there, "one", 1, tmp_path / "gate")
        notice = _noticed(there, workload)
        assert notice["detail"]["notice"] == "walltime"
        wait_until(lambda: _runs_again(there, workload), "it runs again", 150)
