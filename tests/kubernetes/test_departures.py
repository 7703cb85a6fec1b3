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


def _running(there: KubernetesSite, name: str, tasks: int, gate: Path, step_s: float = 0.1) -> str:
    workload = there.up.submit(name, 100_000, step_s, tasks=tasks, gate=gate)
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


def _instance_of(there: KubernetesSite, pod: str) -> dict[str, Any]:
    """Returns the instance of a pod, which has its name."""
    (found,) = [one for one in there.instances(gone=True) if one["id"] == pod]
    return found


def _why_gone(there: KubernetesSite, pod: str) -> str:
    """Waits until the instance of a pod is gone; returns why."""
    wait_until(lambda: _instance_of(there, pod)["phase"] == "gone", f"{pod} is gone")
    return str(_instance_of(there, pod)["reason"]["sentence"])


def _attempt(there: KubernetesSite, workload: str) -> int:
    return max(int(one["attempt"]) for one in there.up.client().allocations(workload))


def _until_again(there: KubernetesSite, workload: str, *, noticed: bool = True) -> None:
    """Waits until a workload runs again, from the newest step that its first attempt has saved.

    `noticed`: that attempt had notice, and saved after its workload had left. Otherwise its last save may
    not be reported.
    """

    def again() -> bool:
        return there.up.phase(workload) == "running" and _attempt(there, workload) > 1

    wait_until(again, "it runs again", 150)
    wait_until(lambda: there.up.client().attempts(workload)[1]["checkpoint_step"], "it has saved again")
    first, second, *_ = there.up.client().attempts(workload)
    saved, resumed = int(first["checkpoint_step"] or 0), int(second["resumed_step"] or 0)
    assert resumed >= saved > 0
    if noticed:
        assert resumed == saved
        (left,) = [one for one in there.up.client().events(workload) if one["kind"] == "workload.preempted"]
        assert saved > int(left["detail"]["checkpoint_step"] or 0)


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
    assert "Deleted: the pod was deleted or evicted" in _why_gone(there, name)


def test_a_deletion_with_another_grace(there: KubernetesSite, tmp_path: Path) -> None:
    """If a pod is deleted with a shorter grace than its own, its machine's notice gets that deadline with a round.

    The agent assumes the pod's own grace. Its notice may come before the round or after it.
    Each step takes longer than a round, and the task saves after its step, so its machine is there until then.
    """
    workload = _running(there, "one", 1, tmp_path / "gate", step_s=4)
    (name,) = there.cluster.pods()
    (machine,) = there.up.machines_of(workload)
    began_s = time.time()
    there.cluster.call("DELETE", pod_path(name), {"gracePeriodSeconds": 8})
    first_s = _noticed(there, workload)["detail"]["ends_at_s"] - began_s
    assert first_s in (pytest.approx(GRACE_S, abs=3), pytest.approx(8, abs=3))

    def corrected() -> bool:
        cordon: Any = there.up.client().machine(machine)["cordon"]
        return bool(cordon["code"] == "platform_notice" and cordon["detail"]["ends_at_s"] < began_s + 11)

    wait_until(corrected, "it has the true deadline", 30)
    _until_again(there, workload)
    assert "Deleted: the pod was deleted or evicted" in _why_gone(there, name)


def test_the_scheduler_preempts(there: KubernetesSite, tmp_path: Path) -> None:
    """A pod of a higher priority takes the place of a machine; the gang saves, and the instance has the reason."""
    workload = _running(there, "gang", 4, tmp_path / "gate")
    agent: dict[str, Any] = {"name": "agent", "image": IMAGE, "command": ["sleep", "15"]}
    agent |= {"resources": {"limits": {"cpu": "2", "nvidia.com/gpu": "1"}}}
    spec = {"priorityClassName": "high", "restartPolicy": "Never", "containers": [agent]}
    there.cluster.call("POST", pod_path(), {"metadata": {"name": "urgent"}, "spec": spec})
    _noticed(there, workload)
    there.cluster.until(lambda: there.cluster.pods()["urgent"]["status"]["phase"] == "Succeeded", "the other ran", 90)
    there.cluster.call("DELETE", pod_path("urgent"))
    _until_again(there, workload)
    (taken,) = [one["involvedObject"]["name"] for one in there.cluster.events("Preempted")]
    assert f"Preempted: Preempted by {NAMESPACE}/urgent" in _why_gone(there, taken)


def test_a_node_fails(there: KubernetesSite, tmp_path: Path) -> None:
    """A gang on a node that does not answer goes on on another node, and the instance has the reason."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    (pod,) = there.cluster.pods().values()
    there.nodes.silence(pod["spec"]["nodeName"], kill=True)
    try:
        _until_again(there, workload, noticed=False)
    finally:
        there.nodes.resume(pod["spec"]["nodeName"])
    assert "NodeLost: " in _why_gone(there, pod["metadata"]["name"])


@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hangs"])
def test_the_api_server_is_away(there: KubernetesSite, tmp_path: Path, *, hangs: bool) -> None:
    """While the API server is dead or hangs, gangs run on, nothing is lost, and the pool says so; then it grows."""
    workload = _running(there, "one", 1, tmp_path / "gate")
    before = set(there.cluster.pods())
    if hangs:
        there.cluster.freeze("kube-apiserver")
    else:
        there.cluster.kill("kube-apiserver")
    other = there.up.submit("two", 10, 0.1, tasks=2)
    wait_until(lambda: f"/namespaces/{NAMESPACE}/pods: " in there.why(), "the pool says why it cannot grow", 90)
    time.sleep(20)
    assert there.up.phase(workload) == "running"
    if hangs:
        there.cluster.freeze("kube-apiserver", thaw=True)
    else:
        there.cluster.start_api()
    wait_until(lambda: there.up.ended(other), "the other one has run", 150)
    assert before <= set(there.cluster.pods())
    assert (there.up.phase(workload), _attempt(there, workload)) == ("running", 1)
