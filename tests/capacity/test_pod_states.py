"""Pods as clusters describe them: of 1.28 and newer, and before 1.26, where only events explain a deletion.

Only their wire format, without a server: that of tests/kubernetes is of 1.20.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from capacity.provider import FoundMachine, ProviderUnavailable
from capacity.providers.kubernetes.api import KubernetesApi
from capacity.providers.kubernetes.pod import INSTANCE
from capacity.providers.kubernetes.pod_ends import PodEnds
from capacity.providers.kubernetes.settings import KubernetesSettings
from capacity.providers.kubernetes.status import explained, machine_of

AT = "2026-01-02T03:04:05Z"
AT_S = 1767323045.0


def _pod(*conditions: dict[str, Any], deleted: bool = False, node: str | None = "n1", **status: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "in-1", "uid": "u-1", "creationTimestamp": AT, "labels": {INSTANCE: "in-1"}}
    if deleted:
        metadata |= {"deletionTimestamp": AT, "deletionGracePeriodSeconds": 30}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"conditions": list(conditions), **status}}


def _target(reason: str, message: str) -> dict[str, Any]:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


def _agent(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "agent", "state": state}]}


def _machine(pod: dict[str, Any], now_s: float = AT_S) -> FoundMachine:
    why = PodEnds("k8s", None, "").why_deleted(pod) if "deletionTimestamp" in pod["metadata"] else ""  # type: ignore[arg-type]
    return machine_of(pod, now_s, 900, why)


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [
        (
            "PreemptionByScheduler",
            "default-scheduler: preempting to accommodate a higher priority pod",
            "Preempted: def",
        ),
        ("EvictionByEvictionAPI", "Eviction API: evicting", "Evicted: Eviction API: evicting"),
        ("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint", "Evicted: node n1 has a taint"),
        ("DeletionByPodGC", "PodGC: node no longer exists", "NodeLost: PodGC: node no longer exists"),
        ("TerminationByKubelet", "The node was low on resource: memory", "Evicted: The node was low on resource"),
        ("OfAnotherController", "its words", "OfAnotherController: its words"),
    ],
)
def test_disruption_targets(reason: str, message: str, words: str) -> None:
    """The condition DisruptionTarget explains the end of a pod that is being deleted, with its deadline, or ended."""
    leaving = _machine(_pod(_target(reason, message), deleted=True, phase="Running", **_agent(running={})))
    assert (leaving.leaves or "").startswith(words)
    assert (leaving.ends_at_s, leaving.ended, leaving.waits) == (AT_S, None, None)
    ended = _machine(_pod(_target(reason, message), phase="Failed", reason="Terminated", **_agent(terminated={})))
    assert (ended.ended or "").startswith(words)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("WorkloadEvictedDueToPreempted", "Preempted: its words"),
        ("WorkloadEvictedDueToClusterQueueStopped", "Evicted by Kueue: ClusterQueueStopped: its words"),
        ("WorkloadDeleted", "Evicted by Kueue: WorkloadDeleted: its words"),
    ],
)
def test_kueue_ends_a_pod(reason: str, words: str) -> None:
    """The condition that Kueue sets before it deletes a pod gives the reason."""
    target = {"type": "TerminationTarget", "status": "True", "reason": reason, "message": "its words"}
    assert _machine(_pod(target, deleted=True, phase="Running", **_agent(running={}))).leaves == words


def test_a_node_that_does_not_answer() -> None:
    """A taint on a node whose pods are not ready means that it is lost; a pod that nobody confirms has ended later."""
    ready = {"type": "Ready", "status": "False"}
    pod = _pod(_target("DeletionByTaintManager", "…"), ready, deleted=True, phase="Running", **_agent(running={}))
    assert _machine(pod, AT_S + 50).ended is None
    assert _machine(pod, AT_S + 61).ended == (
        "NodeLost: node n1 does not answer; node n1 does not confirm the end of the pod"
    )


def test_waits_and_ends() -> None:
    """A pod waits until the container of its agent has started; its end has the most exact reason."""
    gates = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked"}
    assert _machine(_pod(gates, node=None, phase="Pending")).waits == "SchedulingGated: Scheduling is blocked"
    assert _machine(_pod(node=None, phase="Pending")).waits == "Pending"
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": AT}
    pod = _pod(placed, phase="Pending", **_agent(waiting={"reason": "ContainerCreating"}))
    assert _machine(pod).waits == "ContainerCreating: on node n1"
    assert _machine(pod, AT_S + 901).leaves == "ContainerCreating: on node n1, for 901 s"
    oom = _agent(terminated={"reason": "OOMKilled", "exitCode": 137})
    assert _machine(_pod(phase="Failed", **oom)).ended == "OOMKilled: its agent ended with exit status 137"
    unstored = _machine(_pod(phase="Failed", **_agent(terminated={"reason": "Error", "exitCode": 74}))).ended
    assert unstored == "its agent has ended; output of its tasks could not be stored"
    refused = _pod(phase="Failed", reason="UnexpectedAdmissionError", message="no nvidia.com/gpu is healthy")
    assert _machine(refused).ended == "UnexpectedAdmissionError: no nvidia.com/gpu is healthy"
    assert _machine(_pod(phase="Succeeded", **_agent(terminated={"exitCode": 0}))).ended == "its agent has ended"
    assert _machine(pod).launched_at_s == AT_S


@pytest.mark.parametrize(
    ("reason", "message", "ready", "words"),
    [
        ("Preempted", "Preempted by pods/urgent on node n1", "True", "Preempted: Preempted by pods/urgent on node n1"),
        ("Evicted", "The node was low on resource: memory.", "True", "Evicted: The node was low on resource: memory."),
        ("TaintManagerEviction", "Marking for deletion Pod pods/in-1", "False", "NodeLost: node n1 does not answer"),
        (
            "TaintManagerEviction",
            "Marking for deletion Pod pods/in-1",
            "True",
            "Evicted: node n1 has a taint that ends p",
        ),
    ],
)
def test_events(reason: str, message: str, ready: str, words: str) -> None:
    """Before 1.26 the newest event that explains a deletion gives the reason; others, as Killing, say nothing."""
    pod = _pod({"type": "Ready", "status": ready}, deleted=True, phase="Running", **_agent(running={}))
    scheduled = {"reason": "Scheduled", "message": "Successfully assigned pods/in-1 to n1"}
    killing = {"reason": "Killing", "message": "Stopping container agent"}
    explains = {"reason": reason, "message": message}
    why = explained(pod, [scheduled, explains, killing])
    assert why is not None and why.startswith(words)
    assert machine_of(pod, AT_S, 900, why).leaves == why
    assert explained(pod, [scheduled, killing]) is None


def test_a_taint_that_was_taken_away() -> None:
    """A node that answers again in time ends no pod: what deletes its pods later is something else."""
    pod = _pod({"type": "Ready", "status": "True"}, deleted=True)
    marked = {"reason": "TaintManagerEviction", "message": "Marking for deletion Pod pods/in-1"}
    cancelled = {"reason": "TaintManagerEviction", "message": "Cancelling deletion of Pod pods/in-1"}
    assert explained(pod, [marked, cancelled]) is None
    assert explained(pod, [marked, cancelled, marked]) is not None


def test_the_kubelet_evicts() -> None:
    """A node under pressure ends a pod without its deletion: its status has the reason, in every version."""
    pod = _pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory. ")
    assert _machine(pod).ended == "Evicted: The node was low on resource: memory."


def test_pods_that_cannot_start() -> None:
    """The scheduler's and the kubelet's words say why a pod waits."""
    words = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    waits = _machine(_pod(unplaced, node=None, phase="Pending"), AT_S + 9999)
    assert (waits.waits, waits.leaves, waits.ended) == (f"Unschedulable: {words}", None, None)
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": AT}
    back_off = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}
    pod = _pod(placed, phase="Pending", **_agent(waiting=back_off))
    assert _machine(pod).waits == 'ImagePullBackOff: Back-off pulling image "x"'
    assert _machine(pod, AT_S + 901).leaves == 'ImagePullBackOff: Back-off pulling image "x", for 901 s'


@pytest.mark.parametrize("ports", ["20000-20999", "$PORTS"])
def test_ports(ports: str) -> None:
    """The range of ports is a range or a variable of the container."""
    assert _settings(ports).ports == ports


@pytest.mark.parametrize("ports", ["20000-20999\n", "1-2 --run-as root", "$", "$$", "$1", "$(id)", "20000", "$A-$B"])
def test_other_ports(ports: str) -> None:
    """Nothing else is passed to the shell of the container."""
    with pytest.raises(ValidationError, match="ports"):
        _settings(ports)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"spec": {"nodeSelector": ["gpu"]}}, "spec.nodeSelector must be an object"),
        ({"spec": {"tolerations": {"key": "spot"}}}, "spec.tolerations must be a list"),
        ({"spec": {"volumes": None}}, "spec.volumes must be a list"),
        ({"spec": {"containers": [{"name": "agent", "volumeMounts": {}}]}}, "spec.containers.agent.volumeMounts"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers must be a list of objects with names"),
        ({"metadata": {"labels": []}}, "metadata.labels must be an object"),
        ({"containers": []}, "must have the objects metadata and spec only; it has containers"),
    ],
)
def test_wrong_templates(template: dict[str, Any], says: str) -> None:
    """A template whose fields the provider cannot complete is refused with the settings, and names the field."""
    with pytest.raises(ValidationError, match=says):
        _settings(template=template)


def _settings(ports: str = "20000-20999", **more: Any) -> KubernetesSettings:
    types = {"gpu": {"cpus": 8, "memory": "32GiB"}}
    body = {"region": "r", "machine_types": types, "namespace": "n", "image": "i", "agent": "a", "ports": ports}
    return KubernetesSettings.model_validate({**body, "zones": {"any": {}}, **more})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "Configuration file .*config not found"),
        ("a: [", "config is not valid: ParserError"),
        ("{}", "config is not valid: KeyError"),
        ("{clusters: [], contexts: [], users: [], current-context: none}", "Context 'none' not found"),
    ],
)
def test_wrong_kubeconfigs(tmp_path: Path, content: str | None, says: str) -> None:
    """A kubeconfig that is missing or not valid is named, and the provider does not answer until it is repaired."""
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    api = KubernetesApi("site", _settings(kubeconfig=path))
    with pytest.raises(ProviderUnavailable, match=f"^site: kubeconfig: .*{says}"):
        api.objects("pods")
