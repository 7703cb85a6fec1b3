"""Gangs on pods that the cluster ends: they save before, and go on elsewhere, with the reason in `why`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster import NAMESPACE, pod_path
from tests.kubernetes.kubelet import IMAGE
from tests.kubernetes.site import KubernetesSite, site
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(500)]
GRACE_S = 15
_TAINTS = ("not-ready", "unreachable")
TOLERATIONS = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2}
    for taint in _TAINTS
]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesSite]:
    """A site of two nodes with a pool that grows."""
    template = {"spec": {"tolerations": TOLERATIONS}}
    with site(tmp_path_factory.mktemp("site"), grace_s=GRACE_S, template=template) as made:
        made.start()
        made.pool(size=0, max_size=4, idle_s=5, zones=["batch"])
        made.cluster.call(
            "POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000}
        )
        yield made


@pytest.fixture
def there(installation: KubernetesSite) -> Iterator[KubernetesSite]:
    """The site. After each test its workloads and instances are gone."""
    yield installation
    client = installation.up.client()
    for workload in client.workloads():
        if workload["finished_at"] is None:
            client.cancel(workload["id"])
    wait_until(lambda: not installation.instances(), "no instances are left", 120)


def _running(there: KubernetesSite, name: str, tasks: int, gate: Path) -> str:
    workload = there.up.submit(name, 100_000, 0.1, tasks=tasks, gate=gate)
    wait_until(lambda: there.up.phase(workload) == "running", "it runs", 150)
    wait_until(lambda: there.up.saved_step(workload) is not None, "it has saved")
    return workload


def _noticed(there: KubernetesSite, workload: str) -> dict[str, Any]:
    """Waits until a workload has notice; returns its first one."""

    def found() -> Any:
        reasons = [one["reason"] for one in there.up.client().events(workload)]
        return next((one for one in reasons if one is not None and one["code"] == "platform_notice"), None)

    reason: dict[str, Any] = wait_until(found, "it has notice", 60)
    return reason


def _gone(there: KubernetesSite) -> list[str]:
    return [one["reason"]["sentence"] for one in there.instances(gone=True) if one["phase"] == "gone"]


def _attempt(there: KubernetesSite, workload: str) -> int:
    return max(int(one["attempt"]) for one in there.up.client().allocations(workload))


def _until_again(there: KubernetesSite, workload: str, attempt: int = 1) -> None:
    def again() -> bool:
        return there.up.phase(workload) == "running" and _attempt(there, workload) > attempt

    wait_until(again, "it runs again", 150)
    assert int(there.up.client().workload(workload)["progress"]["step"]) > 0


def test_an_evicted_pod(there: KubernetesSite, tmp_path: Path) -> None:
    """A budget prevents an eviction; without it, the gang has notice with the pod's grace, saves and goes on."""
    workload = _running(there, "gang", 3, tmp_path / "gate")
    (name, *_) = there.cluster.pods()
    budget = there.cluster.protect("all", 3)
    with pytest.raises(AssertionError, match="disruption budget"):
        there.cluster.evict(name)
    assert there.up.phase(workload) == "running"
    there.cluster.call("DELETE", budget)
    began_s = time.time()
    there.cluster.evict(name)
    notice = _noticed(there, workload)
    assert notice["detail"]["ends_at_s"] == pytest.approx(began_s + GRACE_S, abs=3)
    _until_again(there, workload)
    assert any("evicted" in one.lower() or "SIGTERM" in one for one in _gone(there)), _gone(there)


def test_a_deletion_with_another_grace(there: KubernetesSite, tmp_path: Path) -> None:
    """If a pod is deleted with a shorter grace than its own, its tasks get that deadline from the control plane."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    (name,) = there.cluster.pods()
    began_s = time.time()
    there.cluster.call("DELETE", pod_path(name), {"gracePeriodSeconds": 8})

    def ends() -> list[float]:
        reasons = [one["reason"] for one in there.up.client().events(workload)]
        notices = [one for one in reasons if one is not None and one["code"] == "platform_notice"]
        return [float(one["detail"]["ends_at_s"]) for one in notices]

    wait_until(lambda: any(at_s < began_s + 11 for at_s in ends()), "it has the true deadline", 30)
    _until_again(there, workload)


def test_the_scheduler_preempts(there: KubernetesSite, tmp_path: Path) -> None:
    """A pod of a higher priority takes the place of a machine; the gang saves, and the instance has the reason."""
    workload = _running(there, "gang", 4, tmp_path / "gate")
    agent = {"name": "agent", "image": IMAGE, "command": ["sleep", "15"]}
    agent |= {"resources": {"limits": {"cpu": "2", "nvidia.com/gpu": "1"}}}
    spec = {"priorityClassName": "high", "restartPolicy": "Never", "containers": [agent]}
    there.cluster.call("POST", pod_path(), {"metadata": {"name": "urgent"}, "spec": spec})
    _noticed(there, workload)
    there.cluster.until(lambda: there.cluster.pods()["urgent"]["status"]["phase"] == "Succeeded", "the other ran", 90)
    there.cluster.call("DELETE", pod_path("urgent"))
    _until_again(there, workload)
    assert any(f"Preempted: Preempted by {NAMESPACE}/urgent" in one for one in _gone(there)), _gone(there)


def test_a_node_fails(there: KubernetesSite, tmp_path: Path) -> None:
    """A gang on a node that does not answer goes on on another node, and the instance has the reason."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    (pod,) = there.cluster.pods().values()
    there.nodes.silence(pod["spec"]["nodeName"], kill=True)
    _until_again(there, workload)
    there.nodes.resume(pod["spec"]["nodeName"])
    assert any("NodeLost: " in one for one in _gone(there)), _gone(there)


def test_the_api_server_is_away(there: KubernetesSite, tmp_path: Path) -> None:
    """While the API server is dead, gangs run on, and nothing is lost; then the pool grows for what waits."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    before = set(there.cluster.pods())
    there.cluster.kill("kube-apiserver")
    other = there.up.submit("two", 10, 0.1, tasks=2)
    time.sleep(20)
    assert there.up.phase(workload) == "running"
    there.cluster.start_api()
    wait_until(lambda: there.up.ended(other), "the other one has run", 150)
    assert before <= set(there.cluster.pods())
    assert (there.up.phase(workload), _attempt(there, workload)) == ("running", 1)
