"""Pods as clusters of 1.28 and newer describe them. Only their wire format: the server of tests/kubernetes is older."""

from typing import Any

import pytest

from capacity.provider import FoundMachine
from capacity.providers.kubernetes.pod import INSTANCE
from capacity.providers.kubernetes.pod_ends import PodEnds
from capacity.providers.kubernetes.status import machine_of

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
    refused = _pod(phase="Failed", reason="UnexpectedAdmissionError", message="no nvidia.com/gpu is healthy")
    assert _machine(refused).ended == "UnexpectedAdmissionError: no nvidia.com/gpu is healthy"
    assert _machine(_pod(phase="Succeeded", **_agent(terminated={"exitCode": 0}))).ended == "its agent has ended"
    assert _machine(pod).launched_at_s == AT_S
