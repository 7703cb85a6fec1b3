"""Reads Workloads and the resources of MultiKueue."""

from collections.abc import Iterable, Mapping
from typing import Any

from capacity.providers.kubernetes.settings import KubernetesMachineType
from capacity.providers.kubernetes.status import condition
from domain.scheduling import JobRequest
from mizzen_client.convert.quantities import quantity

Object = Mapping[str, Any]
CONTROLLER = "kueue.x-k8s.io/multikueue"
TABLES = "mizzen.io/tables"
"""The annotation of pods with the names of the tables that they read, separated by commas."""


class UnusableWorkload(Exception):
    """A Workload cannot be placed on any machine type of the settings."""


def clusters_of(checks: Iterable[Object], configs: Iterable[Object], clusters: Iterable[Object]) -> dict[str, set[str]]:
    """Returns the active worker clusters of each admission check of MultiKueue."""
    active = {one["metadata"]["name"] for one in clusters if holds(one, "Active")}
    listed = {one["metadata"]["name"]: set(one.get("spec", {}).get("clusters", [])) for one in configs}
    out = {}
    for check in checks:
        spec = check.get("spec", {})
        if spec.get("controllerName") == CONTROLLER:
            out[check["metadata"]["name"]] = listed.get(spec.get("parameters", {}).get("name", ""), set()) & active
    return out


def check_of(workload: Object, known: Iterable[str]) -> Object | None:
    """Returns the state of the Workload's check of MultiKueue; None: it has none."""
    names = set(known)
    return next((one for one in workload.get("status", {}).get("admissionChecks", []) if one["name"] in names), None)


def holds(found: Object, kind: str) -> bool:
    """Returns whether a condition of an object is true."""
    state = condition(found, kind)
    return state is not None and state.get("status") == "True"


def tables_of(workload: Object) -> tuple[str, ...]:
    """Returns the tables that the pods of a Workload read."""
    metadata = [pods.get("template", {}).get("metadata", {}) for pods in workload["spec"].get("podSets", [])]
    texts = [(one.get("annotations") or {}).get(TABLES, "") for one in [*metadata, workload["metadata"]]]
    return tuple(sorted({name.strip() for text in texts for name in text.split(",") if name.strip()}))


def jobs_of(workload: Object, types: Mapping[str, KubernetesMachineType]) -> tuple[JobRequest, ...]:
    """Returns the pod sets of a Workload as jobs.

    Raises:
        UnusableWorkload: a pod needs a resource or a node that no machine type has.
    """
    return tuple(_job(pods, types) for pods in workload["spec"].get("podSets", []) if pods.get("count", 1) > 0)


def _job(pods: Object, types: Mapping[str, KubernetesMachineType]) -> JobRequest:
    name, spec = pods.get("name", "main"), pods["template"]["spec"]
    try:
        needs = _requests(spec)
    except (ValueError, TypeError) as error:
        raise UnusableWorkload(f"pod set {name}: {error}") from None
    extended = {key: amount for key, amount in needs.items() if "/" in key and amount > 0}
    if len(extended) > 1:
        raise UnusableWorkload(f"pod set {name}: several extended resources: {', '.join(sorted(extended))}")
    resource, gpus = next(iter(extended.items()), ("", 0))
    usable = [
        one for one in types.values() if one.gpus and one.gpu_resource == resource and _selected(spec, one, types)
    ]
    if resource and not usable:
        raise UnusableWorkload(f"pod set {name}: no machine type has {resource} and the labels of its node selector")
    # The cheapest type first: it is the preferred one.
    cheapest = sorted(usable, key=lambda one: (one.usd_per_h / one.gpus, one.gpu_type or ""))
    kinds = tuple(dict.fromkeys(one.gpu_type for one in cheapest if one.gpu_type is not None))
    cpus_milli, memory = round(needs.get("cpu", 0.0) * 1000), round(needs.get("memory", 0.0))
    return JobRequest(name, int(pods.get("count", 1)), round(gpus), kinds, cpus_milli, memory)


def _selected(spec: Object, one: KubernetesMachineType, types: Mapping[str, KubernetesMachineType]) -> bool:
    """Returns whether a node selector allows a machine type. Labels that no type names are ignored."""
    known = {key for other in types.values() for key in other.node_selector}
    wanted = spec.get("nodeSelector") or {}
    return all(one.node_selector.get(key) == value for key, value in wanted.items() if key in known)


def _requests(spec: Object) -> dict[str, float]:
    """Returns what a pod requests: its containers and its overhead, or more if an init container needs more."""
    total: dict[str, float] = {}
    inits = spec.get("initContainers") or []
    beside = [one for one in inits if one.get("restartPolicy") == "Always"]
    for one in [*(spec.get("containers") or []), *beside]:
        _add(total, _of_container(one))
    for one in inits:
        for key, amount in _of_container(one).items():
            total[key] = max(total.get(key, 0.0), amount)
    _add(total, {key: float(quantity(str(text))) for key, text in (spec.get("overhead") or {}).items()})
    return total


def _of_container(one: Object) -> dict[str, float]:
    given = one.get("resources") or {}
    texts = {**(given.get("limits") or {}), **(given.get("requests") or {})}
    return {key: float(quantity(str(text))) for key, text in texts.items()}


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for key, amount in more.items():
        total[key] = total.get(key, 0.0) + amount
