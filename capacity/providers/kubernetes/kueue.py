"""Why pods wait in a queue of Kueue: the conditions of their Workloads, where Kueue runs."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.api import ApiRefused, KubernetesApi
from capacity.providers.kubernetes.pod import QUEUE
from capacity.providers.kubernetes.status import condition, said

GROUP, VERSIONS = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
"""Kueue's resources, and their known versions, the preferred one first. The fields used here are equal in both."""
_AGAIN_S = 600.0
"""Whether Kueue runs is asked again after this time."""
_log = logging.getLogger(__name__)


class Queues:
    """The queues of one namespace. Several threads may use it: at worst, both ask whether Kueue runs."""

    def __init__(self, name: str, api: KubernetesApi, namespace: str) -> None:
        self._name, self._api, self._namespace = name, api, namespace
        self._version: str | None = None
        self._asked_s = -_AGAIN_S

    def waits(self, pods: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Returns why pods without a node wait for Kueue, by the uid of the pod.

        It is empty if no such pod has a queue, or Kueue does not run, or its Workloads cannot be read: the pods' own
        states then say why they wait.
        """
        waiting = {
            pod["metadata"]["uid"]
            for pod in pods
            if QUEUE in pod["metadata"].get("labels", {})
            and not pod["spec"].get("nodeName")
            and "deletionTimestamp" not in pod["metadata"]
        }
        if not waiting:
            return {}
        try:
            if time.monotonic() >= self._asked_s + _AGAIN_S:
                self._version = self._api.version_of(GROUP, VERSIONS)
                self._asked_s = time.monotonic()
            if self._version is None:
                return {}
            path = f"/apis/{GROUP}/{self._version}/namespaces/{self._namespace}/workloads"
            workloads, _ = self._api.objects(path)
        except (ApiRefused, ProviderUnavailable) as error:
            _log.warning("%s: Workloads of Kueue: %s", self._name, error)
            return {}
        why = {
            owner["uid"]: words
            for workload in workloads
            if (words := why_queued(workload)) is not None
            for owner in workload["metadata"].get("ownerReferences", [])
        }
        return {uid: why[uid] for uid in waiting & why.keys()}


def why_queued(workload: Mapping[str, Any]) -> str | None:
    """Returns why Kueue does not let a Workload's pods start; None: it does."""
    if workload.get("spec", {}).get("active") is False:
        return said("QueueDeactivated", _message(workload, "Evicted"))
    if _holds(workload, "Finished"):
        return said("QueueFinished", _message(workload, "Finished"))
    if _holds(workload, "Admitted"):
        return None
    if _holds(workload, "QuotaReserved"):
        checks = [one for one in workload["status"].get("admissionChecks", []) if one.get("state") != "Ready"]
        words = [said(f"{one['name']} is {one.get('state')}", one.get("message")) for one in checks]
        return said("AdmissionChecks", "; ".join(words) or _message(workload, "Admitted"))
    if _holds(workload, "Evicted"):
        evicted = condition(workload, "Evicted") or {}
        return said(f"Queue{evicted.get('reason')}", evicted.get("message"))
    quota = condition(workload, "QuotaReserved") or {}
    reason = "QueueInadmissible" if quota.get("reason") == "Inadmissible" else "QuotaPending"
    return said(reason, quota.get("message"))


def _holds(workload: Mapping[str, Any], kind: str) -> bool:
    found = condition(workload, kind)
    return found is not None and found.get("status") == "True"


def _message(workload: Mapping[str, Any], kind: str) -> str | None:
    found = condition(workload, kind)
    return None if found is None else found.get("message")
