"""The main path on a real Kubernetes cluster: a gang waits, pods start, the gang runs over two nodes, and pods end."""

from pathlib import Path

import pytest

from tests.kubernetes.site import site
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(400)]


def test_a_gang_runs_on_pods(tmp_path: Path) -> None:
    """A pool grows for a gang of three tasks by one pod for each machine, and shrinks by deleting the pods."""
    with site(tmp_path) as there:
        there.start()
        there.pool(size=0, max_size=4, idle_s=2)
        gate = tmp_path / "gate"
        gang = there.up.submit("gang", 40, 0.1, tasks=3, gate=gate)
        wait_until(lambda: there.up.phase(gang) == "running", "the gang runs", 150)
        ready = {one["id"]: one["native_id"] for one in there.until_ready(3)}
        pods = there.cluster.pods()
        assert ready == {name: f"{name}.{pod['metadata']['uid']}" for name, pod in pods.items()}
        assert {pod["spec"]["nodeName"] for pod in pods.values()} == {"n1", "n2"}
        gate.touch()
        wait_until(lambda: there.up.ended(gang), "the gang succeeds")
        wait_until(lambda: not there.cluster.pods(), "all pods have ended")
        wait_until(lambda: not there.instances(), "all instances are gone")
        there.cluster.until(lambda: not there.secrets(), "their Secrets are deleted")
