"""One region whose machines are pods of a Kubernetes cluster and pilot jobs of a Slurm cluster."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import drifting_job
from tests.kubernetes.cluster import cluster
from tests.kubernetes.kubelet import nodes
from tests.kubernetes.site import KubernetesSite
from tests.slurm.bench import settings_for
from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.cluster import cluster as slurm_cluster
from tests.stack.harness import ROOT, wait_until

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(500)]
_RESOURCES = {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm cluster of one node, which holds two pilots."""
    if (why := missing()) is not None:
        pytest.skip(why)
    with slurm_cluster(1) as made:
        yield made


@pytest.fixture(scope="module")
def there(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesSite]:
    """The site. Both clusters have a zone `batch` of spot machines, and room for two machines."""
    with cluster() as pods, nodes(pods, 1) as kubelets:
        made = KubernetesSite(pods, kubelets, tmp_path_factory.mktemp("site"))
        try:
            pilots = settings_for(slurm, region="cloud", agent=made.agent, kill_wait_s=5)
            made.add_provider("slurm", pilots, "hpc")
            made.up.environment = {"PATH": slurm.environ["PATH"]}
            made.start()
            yield made
        finally:
            made.close()


def _submit(there: KubernetesSite, name: str, tasks: int, run: str, **job: Any) -> str:
    jobs = [{"name": "train", "tasks": tasks, "resources": _RESOURCES, "run": run, **job}]
    checkpoint = {"interval": "1s", "grace": "5s"}
    document = {"version": 1, "name": name, "tenant": "t", "checkpoint": checkpoint, "jobs": jobs}
    return str(there.up.client().submit(document)["id"])


def _providers(there: KubernetesSite, workload: str) -> list[str]:
    """Returns the providers of the machines of a workload's newest attempt."""
    of = {one["machine"]: one["provider"] for one in there.instances(gone=True)}
    return sorted(of[machine] for machine in there.up.machines_of(workload))


def test_preempted_on_slurm_it_continues_on_kubernetes(
    there: KubernetesSite, slurm: SlurmCluster, tmp_path: Path
) -> None:
    """A training that Slurm preempts ends on a pod with exactly the value of one that was never stopped."""
    there.pool(size=0, max_size=1, idle_s=2, zones=["batch"], providers=["hpc"])
    result, gate = tmp_path / "result", tmp_path / "gate"
    run = f'PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON" "{drifting_job.__file__}" "{result}" "{gate}"'
    workload = _submit(there, "drifts", 1, run)
    wait_until(lambda: there.up.saved_step(workload), "it has saved", 150)
    assert _providers(there, workload) == ["hpc"]
    there.pool(providers=["site"])
    other = slurm.command(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=1", "--exclusive", "--chdir=/", "--output=/dev/null",
        "--wrap=sleep 600",
    )  # fmt: skip
    wait_until(lambda: _providers(there, workload) == ["site"], "it has a pod", 150)
    wait_until(lambda: there.up.client().attempts(workload)[1]["checkpoint_step"], "it has saved again", 90)
    slurm.command("scancel", other)
    first, second = there.up.client().attempts(workload)
    assert second["resumed_step"] == first["checkpoint_step"] > 0
    gate.touch()
    wait_until(lambda: there.up.ended(workload), "it ends")
    steps, value = result.read_text().split()
    assert int(steps) > second["resumed_step"]
    random.seed(7)
    expected = 0.0
    for _ in range(int(steps)):
        expected = drifting_job.changed(expected)
    assert float(value) == expected


def test_a_gang_uses_both_only_if_it_says_so(there: KubernetesSite, tmp_path: Path) -> None:
    """The machines of one pool and zone name are two clusters: a gang of four waits, unless it may span clusters."""
    there.pool(size=0, max_size=0, zones=["batch"], providers=["hpc"])
    wait_until(lambda: not there.instances(), "nothing is left of another test", 90)
    there.pool(size=2, max_size=4)
    there.until_ready(2)
    there.pool(size=4, providers=["site"])
    there.until_ready(4, 150)
    gate = tmp_path / "gate"
    run = f'until [ -e "{gate}" ]; do sleep 0.1; done'
    waiting = _submit(there, "stays", 4, run)
    spanning = _submit(there, "spans", 4, run, span_clusters=True)
    wait_until(lambda: there.up.phase(spanning) == "running", "it runs")
    assert _providers(there, spanning) == ["hpc", "hpc", "site", "site"]
    assert there.up.phase(waiting) == "pending"
    gate.touch()
    wait_until(lambda: there.up.ended(spanning), "it ends")
    assert there.up.phase(waiting) == "pending"
