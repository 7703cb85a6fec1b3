"""Gangs on pilots that Slurm ends: they save before, and go on elsewhere, with the reason in `why`."""

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.bench import PARTITIONS
from tests.slurm.cluster import cluster
from tests.slurm.site import SlurmSite, site
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSite]:
    """A site with a pool that grows in the partition `batch`; the zone `short` is the same one with a short limit."""
    zones = {**PARTITIONS, "short": {"partition": "batch", "kind": "spot", "time_s": 120}}
    with site(tmp_path_factory.mktemp("site"), partitions=zones, leave_s=60) as made:
        made.start()
        made.pool(size=0, max_size=4, idle_s=5, zones=["batch"])
        yield made


@pytest.fixture
def there(installation: SlurmSite) -> Iterator[SlurmSite]:
    """The site. After each test its workloads, jobs and drained nodes are gone."""
    yield installation
    for workload in installation.up.client().workloads():
        if workload["finished_at"] is None:
            installation.up.client().cancel(workload["id"])
    installation.slurm.command("scancel", "--user=root")
    installation.slurm.command("scontrol", "update", "nodename=ALL", "state=undrain")
    wait_until(lambda: not installation.instances(), "no instances are left")


def _running(there: SlurmSite, name: str, tasks: int, gate: Path) -> str:
    workload = there.up.submit(name, 100_000, 0.1, tasks=tasks, gate=gate)
    wait_until(lambda: there.up.phase(workload) == "running", "it runs")
    wait_until(lambda: there.up.saved_step(workload) is not None, "it has saved")
    return workload


def _noticed(there: SlurmSite, workload: str) -> dict[str, Any]:
    """Waits until a workload has notice; returns its reason."""

    def found() -> Any:
        reasons = [one["reason"] for one in there.up.client().events(workload)]
        return next((one for one in reasons if one is not None and one["code"] == "platform_notice"), None)

    reason: dict[str, Any] = wait_until(found, "it has notice", 150)
    return reason


def _gone(there: SlurmSite) -> list[str]:
    return [one["reason"]["sentence"] for one in there.instances(gone=True) if one["phase"] == "gone"]


def test_tasks_get_the_gpus_that_slurm_gave(there: SlurmSite) -> None:
    """Of two pilots on one node, each offers the GPU that Slurm gave it, and its task sees this one."""
    resources = {"accelerators": "a100:1", "cpus": 1, "memory": "64MiB"}
    say = {"name": "say", "tasks": 4, "resources": resources, "run": 'echo "gpus=$CUDA_VISIBLE_DEVICES"; sleep 2'}
    document = {"version": 1, "name": "gpus", "tenant": "t", "jobs": [say]}
    workload = str(there.up.client().submit(document)["id"])
    wait_until(lambda: there.up.ended(workload), "it has run")
    lines = wait_until(lambda: (found := list(there.up.client().logs(workload)))[3:] and found, "four lines are there")
    assert sorted(line.decode().rpartition("gpus=")[2] for line in lines) == ["0", "0", "1", "1"]


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


@pytest.mark.parametrize("hint", ["absent", "spent"])
def test_a_higher_partition_preempts_without_the_hint(tmp_path: Path, hint: str) -> None:
    """A gang saves in the grace of a preemption also if Slurm sends no signal of `--signal` for it.

    absent: a site removes the option, and Slurm sends SIGTERM at once. spent: the signal came before for the time
    limit, and Slurm sends nothing until the end of the grace.
    """
    with cluster(2, user_signal=hint == "spent") as slurm:
        short = {"partition": "batch", "kind": "spot", "time_s": 120 if hint == "spent" else 3600}
        made = SlurmSite(slurm, tmp_path / "site", partitions={"short": short, "batch": {"kind": "spot"}}, leave_s=100)
        if hint == "absent":
            (wrapper := tmp_path / "sbatch").write_text(_WITHOUT_SIGNAL)
            wrapper.chmod(0o755)
            slurm.environ["PATH"] = f"{tmp_path}:{slurm.environ['PATH']}"
        try:
            made.start()
            made.pool(size=0, max_size=2, idle_s=5, zones=["short"])
            workload = _running(made, "one", 1, tmp_path / "gate")
            made.pool(size=0, max_size=4, zones=["batch"])
            slurm.command(
                "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--chdir=/", "--output=/dev/null",
                "--wrap=sleep 20",
            )  # fmt: skip
            began_s = time.time()
            notice = _noticed(made, workload)
            assert notice["detail"]["notice"] == "preempt"
            assert notice["detail"]["ends_at_s"] == pytest.approx(began_s + 20, abs=12)
            wait_until(lambda: _runs_again(made, workload), "it runs again", 150)
            wait_until(lambda: made.up.client().attempts(workload)[1]["checkpoint_step"], "it has saved again")
            first, second, *_ = made.up.client().attempts(workload)
            assert second["resumed_step"] == first["checkpoint_step"] > 0
            assert any("preempt" in sentence for sentence in _gone(made))
        finally:
            made.close()


_WITHOUT_SIGNAL = """#!/bin/sh
for word do
    shift
    case $word in --signal=*) ;; *) set -- "$@" "$word" ;; esac
done
exec /usr/bin/sbatch "$@"
"""


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


def test_a_node_fails(there: SlurmSite, tmp_path: Path) -> None:
    """A gang on a node that Slurm considers failed is told so, although the agent there still answers, and moves."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    (node,) = there.slurm.command("squeue", "-h", "-o", "%N").splitlines()
    there.slurm.kill(node)
    there.slurm.command("scontrol", "update", f"nodename={node}", "state=down", "reason=broken")
    wait_until(lambda: _runs_again(there, workload), "it runs again", 150)
    reasons = [one["reason"] for one in there.up.client().events(workload) if one["reason"] is not None]
    lost = [one["sentence"] for one in reasons if one["code"] == "machine_lost"]
    assert any(f"node {node} has failed" in sentence for sentence in lost), reasons
    assert any(f"node {node} has failed" in sentence for sentence in _gone(there))
    there.slurm.start_node(node)


@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hangs"])
def test_the_controller_is_away(there: SlurmSite, tmp_path: Path, *, hangs: bool) -> None:
    """While slurmctld is dead or hangs, gangs run on, nothing is lost, and the pool says so; then it grows.

    One that hangs may accept submissions later whose answers were lost: no instance keeps two jobs.
    """
    workload = _running(there, "one", 1, tmp_path / "gate")
    before = there.slurm.jobs()
    if hangs:
        there.slurm.freeze("slurmctld")
    else:
        there.slurm.kill_saved_controller()
    other = there.up.submit("two", 10, 0.1, tasks=2)
    wait_until(lambda: "squeue" in there.why(), "the pool says why it cannot grow", 90)
    time.sleep(25)
    assert there.up.phase(workload) == "running"
    if hangs:
        there.slurm.freeze("slurmctld", thaw=True)
    else:
        there.slurm.start_controller()
    wait_until(lambda: there.up.ended(other), "the other one has run", 150)
    wait_until(lambda: all(len(one) == 1 for one in there.slurm.jobs().values()), "no instance has two jobs")
    assert before.items() <= there.slurm.jobs().items()
    assert _attempt(there, workload) == 1


def test_a_time_limit(there: SlurmSite, tmp_path: Path) -> None:
    """A gang saves before the time limit of its pilot, and goes on on another pilot."""
    there.pool(zones=["short"])
    workload = _running(there, "one", 1, tmp_path / "gate")
    there.pool(zones=["batch"])
    notice = _noticed(there, workload)["detail"]
    assert notice["notice"] == "walltime"
    wait_until(lambda: _runs_again(there, workload), "it runs again", 150)
    wait_until(lambda: there.up.client().attempts(workload)[1]["checkpoint_step"], "it has saved again")
    first, second, *_ = there.up.client().attempts(workload)
    assert second["resumed_step"] == first["checkpoint_step"] > 0
    assert datetime.fromisoformat(first["checkpoint_at"]).timestamp() < notice["ends_at_s"]
