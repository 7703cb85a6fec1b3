"""Derives the state of a machine from the status of its pod: waits, ends, and the reasons."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from capacity.provider import FoundMachine
from capacity.providers.kubernetes.pod import ENDED, INSTANCE, native_id
from capacity.providers.kubernetes.settings import AGENT
from domain import agent_exits

Object = Mapping[str, Any]
BY_MIZZEN = "mizzen ended the pod"
_UNCONFIRMED_S = 60.0
"""If the node of a deleted pod has not confirmed its end this long after the grace period, the node is lost."""
_TAINTED = "a taint"
_DISRUPTIONS = {
    "PreemptionByKubeScheduler": "Preempted",
    "PreemptionByScheduler": "Preempted",
    "DeletionByTaintManager": _TAINTED,
    "DeletionByPodGC": "NodeLost",
    "EvictionByEvictionAPI": "Evicted",
    "TerminationByKubelet": "Evicted",
}
"""Reasons of the condition DisruptionTarget, which exists from 1.26 on."""
_BY_KUEUE = "WorkloadEvictedDueTo"
"""The beginning of the reason of the condition TerminationTarget, which Kueue sets before it deletes a pod."""
_EVENTS = {"Preempted": "Preempted", "TaintManagerEviction": _TAINTED, "Evicted": "Evicted"}
"""Reasons of events about a pod that explain its end before 1.26."""


def machine_of(pod: Object, now_s: float, start_limit_s: float, why_deleted: str) -> FoundMachine:
    """Returns a pod as a machine. `why_deleted`: why the pod is being deleted, if it is."""
    metadata = pod["metadata"]
    deleted_s = seconds(metadata.get("deletionTimestamp"))
    waiting, placed_s = waits(pod), _since(pod, "PodScheduled")
    leaves = None
    if deleted_s is not None:
        leaves = why_deleted
    elif waiting is not None and placed_s is not None and now_s - placed_s > start_limit_s:
        leaves = f"{waiting}, for {now_s - placed_s:.0f} s"
    return FoundMachine(
        native_id(pod),
        metadata["labels"].get(INSTANCE, ""),
        seconds(metadata["creationTimestamp"]) or 0.0,
        waits=waiting,
        ends_at_s=deleted_s,
        leaves=leaves,
        ended=_ended(pod, now_s, why_deleted),
    )


def _ended(pod: Object, now_s: float, why_deleted: str) -> str | None:
    metadata, status = pod["metadata"], pod["status"]
    deleted_s = seconds(metadata.get("deletionTimestamp"))
    if deleted_s is not None and ENDED in metadata["labels"]:
        return BY_MIZZEN
    if status.get("phase") in ("Failed", "Succeeded"):
        return why_deleted if deleted_s is not None else why_ended(pod)
    if deleted_s is not None and now_s > deleted_s + _UNCONFIRMED_S:
        return f"{why_deleted}; node {pod['spec'].get('nodeName')} does not confirm the end of the pod"
    return None


def waits(pod: Object) -> str | None:
    """Returns why the container of the agent does not run yet; None: it runs, or has run."""
    status = pod["status"]
    if status.get("phase") in ("Failed", "Succeeded"):
        return None
    if not pod["spec"].get("nodeName"):
        placed = condition(pod, "PodScheduled")
        return said(placed.get("reason") or "Pending", placed.get("message")) if placed else "Pending"
    state = _agent(pod).get("state", {})
    if "running" in state or "terminated" in state:
        return None
    first = next((one for one in _waiting(pod) if one.get("reason")), {})
    return said(first.get("reason") or "Starting", first.get("message") or f"on node {pod['spec']['nodeName']}")


def _waiting(pod: Object) -> list[Object]:
    """Returns the waiting states of the pod's containers: of the init containers, the agent, then of the others."""
    status = pod["status"]
    containers = [*status.get("initContainerStatuses", []), _agent(pod), *status.get("containerStatuses", [])]
    return [one["state"]["waiting"] for one in containers if "waiting" in one.get("state", {})]


def why_ended(pod: Object) -> str:
    """Returns the reason of the end of a pod that was not deleted."""
    status = pod["status"]
    if (target := disruption(pod)) is not None:
        return target
    if status.get("reason"):
        return said(status["reason"], status.get("message"))
    ended = _agent(pod).get("state", {}).get("terminated", {})
    code = ended.get("exitCode", 0)
    if ended.get("reason") not in (None, "Error", "Completed"):
        return said(ended["reason"], ended.get("message") or f"its agent ended with exit status {code}")
    if code == 0:
        return "its agent has ended"
    words = agent_exits.SAID.get(code, f"its agent ended with exit status {code}")
    return said(words, _last_line(ended.get("message")))


def disruption(pod: Object) -> str | None:
    """Returns the cluster's or Kueue's reason for the end of a pod, from its conditions; None: they have none."""
    target = condition(pod, "DisruptionTarget")
    if target is not None and target.get("status") == "True":
        reason = str(target.get("reason"))
        return _because(pod, _DISRUPTIONS.get(reason, reason), target.get("message"))
    target = condition(pod, "TerminationTarget")
    if target is None or target.get("status") != "True":
        return None
    reason = str(target.get("reason")).removeprefix(_BY_KUEUE)
    return said(reason if reason == "Preempted" else f"Evicted by Kueue: {reason}", target.get("message"))


def explained(pod: Object, events: Sequence[Object]) -> str | None:
    """Returns the reason for the end of a pod from the events about it; None: none of them explains it."""
    for event in reversed(events):
        if str(event.get("message")).startswith("Cancelling deletion"):
            return None  # The taint was removed in time.
        if (reason := _EVENTS.get(event.get("reason", ""))) is not None:
            return _because(pod, reason, event.get("message"))
    return None


def _because(pod: Object, reason: str, message: str | None) -> str:
    """Returns a reason with its message. The cluster taints a node that does not answer, and people taint others."""
    node = f"node {pod['spec'].get('nodeName')}"
    if reason == _TAINTED:
        ready = condition(pod, "Ready")
        lost = ready is not None and ready.get("status") != "True"
        return f"NodeLost: {node} does not answer" if lost else f"Evicted: {node} has a taint that ends pods"
    return said(reason, message or node)


def condition(pod: Object, kind: str) -> Object | None:
    """Returns a condition of a pod or of another object, or None."""
    return next((one for one in pod.get("status", {}).get("conditions", []) if one["type"] == kind), None)


def seconds(text: str | None) -> float | None:
    """Parses a time of Kubernetes, in seconds since the epoch; None: there is none."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _since(pod: Object, kind: str) -> float | None:
    found = condition(pod, kind)
    return seconds(found.get("lastTransitionTime")) if found and found.get("status") == "True" else None


def _agent(pod: Object) -> Object:
    return next((one for one in pod["status"].get("containerStatuses", []) if one["name"] == AGENT), {})


def said(reason: str, message: str | None) -> str:
    """Returns a reason with its message, if there is one."""
    return f"{reason}: {message.strip()}" if message and message.strip() else reason


def _last_line(text: str | None) -> str | None:
    return text.strip().splitlines()[-1] if text and text.strip() else None
