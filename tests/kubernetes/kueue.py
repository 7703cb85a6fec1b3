"""The resources of Kueue as minimal CRDs of our own writing, and what its controllers write. Kueue does not run here.

Its own CRDs need a newer API server than that of the tests. Group, version, kinds and field types are Kueue's.
"""

import json
from typing import Any

import httpx

from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster

GROUP, VERSION = "kueue.x-k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
CHECK = "multikueue"
_TEXT: dict[str, Any] = {"type": "string"}
_ANY: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _keyed(key: str) -> dict[str, Any]:
    items = {**_ANY, "required": [key], "properties": {key: _TEXT}}
    # Nullable: an apply that drops all items leaves null in 1.20.
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "nullable": True, **keys, "items": items}


_STATUS = {
    "admission": _ANY,
    "requeueState": _ANY,
    "conditions": _keyed("type"),
    "admissionChecks": _keyed("name"),
    "nominatedClusterNames": {"type": "array", "x-kubernetes-list-type": "atomic", "maxItems": 10, "items": _TEXT},
    "clusterName": _TEXT,
}
_KINDS = {"Workload": True, "AdmissionCheck": False, "MultiKueueConfig": False, "MultiKueueCluster": False}
"""The kinds, and whether they are in namespaces."""


def install(there: KubernetesCluster) -> None:
    """Creates the CRDs, and waits until they are served."""
    for kind, named in _KINDS.items():
        plural = kind.lower() + "s"
        status = {"type": "object", "properties": _STATUS} if named else _ANY
        schema = {"type": "object", "properties": {"spec": _ANY, "status": status}}
        version = {"name": VERSION, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        spec = {
            "group": GROUP,
            "scope": "Namespaced" if named else "Cluster",
            "names": {"plural": plural, "kind": kind},
            "versions": [{**version, "subresources": {"status": {}}}],
        }
        body = {"metadata": {"name": f"{plural}.{GROUP}"}, "spec": spec}
        there.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
    for kind in _KINDS:
        there.until(lambda kind=kind: there.call("GET", f"{ROOT}/{kind.lower()}s"), f"{kind} is served")  # type: ignore[misc]


def path_of(name: str = "") -> str:
    """Returns the path of the Workloads of the namespace, or of one of them."""
    return f"{ROOT}/namespaces/{NAMESPACE}/workloads" + (f"/{name}" if name else "")


def condition(kind: str, reason: str, message: str = "", *, holds: bool = True) -> dict[str, Any]:
    """Returns a condition."""
    at = "2026-01-02T03:04:05Z"
    return {
        "type": kind, "status": "True" if holds else "False", "reason": reason, "message": message,
        "lastTransitionTime": at,
    }  # fmt: skip


def apply_status(there: KubernetesCluster, name: str, status: dict[str, Any], manager: str = "kueue-admission") -> None:
    """Applies a status as Kueue's controllers do. Fields that the manager applied before and that are missing go.

    Raises:
        AssertionError: it was refused.
    """
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Workload", "metadata": {"name": name}, "status": status}
    with httpx.Client(base_url=there.url, verify=False, timeout=20, trust_env=False) as http:
        answer = http.patch(
            f"{path_of(name)}/status?fieldManager={manager}&force=true",
            content=json.dumps(body),
            headers={"content-type": "application/apply-patch+yaml", "authorization": "Bearer admin-token"},
        )
    assert answer.status_code == 200, answer.text


def multikueue(there: KubernetesCluster, *clusters: str) -> None:
    """Creates an admission check of MultiKueue whose queue may use these worker clusters, all active."""
    there.call("POST", f"{ROOT}/multikueueconfigs", _object("MultiKueueConfig", "all", {"clusters": [*clusters]}))
    parameters = {"apiGroup": GROUP, "kind": "MultiKueueConfig", "name": "all"}
    spec = {"controllerName": "kueue.x-k8s.io/multikueue", "parameters": parameters}
    there.call("POST", f"{ROOT}/admissionchecks", _object("AdmissionCheck", CHECK, spec))
    for name in clusters:
        there.call("POST", f"{ROOT}/multikueueclusters", _object("MultiKueueCluster", name, {}))
        set_active(there, name, holds=True)


def set_active(there: KubernetesCluster, cluster: str, *, holds: bool) -> None:
    """Sets whether Kueue reaches a worker cluster."""
    status = {"status": {"conditions": [condition("Active", "Active", holds=holds)]}}
    there.patch(f"{ROOT}/multikueueclusters/{cluster}/status", status)


def submit(there: KubernetesCluster, name: str, gpus: int, *, priority: int = 0, tables: str = "") -> None:
    """Creates a Workload with a pod that requests GPUs, and reserves quota for it on the manager cluster."""
    requests = {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": str(gpus)}
    pod = {"containers": [{"name": "c", "resources": {"requests": requests}}]}
    annotations = {"metadata": {"annotations": {"mizzen.io/tables": tables}}} if tables else {}
    spec = {"podSets": [{"name": "main", "count": 1, "template": {**annotations, "spec": pod}}], "priority": priority}
    there.call("POST", path_of(), _object("Workload", name, spec))
    apply_status(there, name, reserved())


def reserved(**more: Any) -> dict[str, Any]:
    """Returns the status of a Workload that has quota and waits for a worker cluster, as Kueue applies it."""
    check = {"name": CHECK, "state": "Pending", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}
    return {
        "admission": {"clusterQueue": "q", "podSetAssignments": [{"name": "main", "count": 1}]},
        "conditions": [condition("QuotaReserved", "QuotaReserved", "Quota reserved in ClusterQueue q")],
        "admissionChecks": [check],
        **more,
    }


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, "spec": spec}
