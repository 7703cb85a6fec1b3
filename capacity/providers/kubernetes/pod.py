"""The manifests of a machine: the pod, from the template of the settings, and the Secret with its credentials."""

import copy
from collections.abc import Mapping
from typing import Any

from capacity.provider import LaunchRequest
from capacity.providers.agent_command import agent_flags
from capacity.providers.kubernetes.settings import AGENT, KubernetesSettings

INSTALLATION, PROVIDER, INSTANCE = "mizzen.io/installation", "mizzen.io/provider", "mizzen.io/instance"
"""Labels. The first two select the pods of one provider of one installation."""
ENDED = "mizzen.io/ended"
"""The label of pods that mizzen itself ends."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""The label by which Kueue finds the LocalQueue of a pod."""
_STATE = "mizzen-state"
_JOIN, _KEY = "join-token", "machine-key"


def native_id(pod: Mapping[str, Any]) -> str:
    """Returns the provider's id of a pod's machine. A later pod of the same name is another machine."""
    return f"{pod['metadata']['name']}.{pod['metadata']['uid']}"


def pod_of(settings: KubernetesSettings, request: LaunchRequest, labels: dict[str, str]) -> dict[str, Any]:
    """Returns the pod of an instance; its name is the instance's id. It contains no secret."""
    template = copy.deepcopy(settings.template)
    metadata, spec = template.get("metadata", {}), template.get("spec", {})
    zone, machine = settings.zones[request.offer.zone], settings.machine_types[request.offer.shape.machine_type]
    own = {"app.kubernetes.io/managed-by": "mizzen", **labels, INSTANCE: request.instance}
    if zone.queue is not None:
        own[QUEUE] = zone.queue
    metadata |= {"name": request.instance, "labels": metadata.get("labels", {}) | own}
    spec["restartPolicy"] = "Never"
    spec["terminationGracePeriodSeconds"] = settings.grace_s
    spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **zone.node_selector, **machine.node_selector}
    spec["tolerations"] = [*spec.get("tolerations", []), *zone.tolerations]
    if zone.priority_class is not None:
        spec["priorityClassName"] = zone.priority_class
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    # The first process of the pod then reaps what tasks leave behind.
    spec.setdefault("shareProcessNamespace", True)
    containers = spec.setdefault("containers", [])
    agent = next((one for one in containers if one["name"] == AGENT), None)
    if agent is None:
        containers.insert(0, agent := {"name": AGENT})
    _complete(settings, request, spec, agent)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _complete(
    settings: KubernetesSettings, request: LaunchRequest, spec: dict[str, Any], agent: dict[str, Any]
) -> None:
    machine = settings.machine_types[request.offer.shape.machine_type]
    agent["image"] = settings.image
    agent["command"] = ["/bin/sh", "-c", script(settings, request)]
    agent.pop("args", None)
    agent["env"] = [*agent.get("env", []), *_environment(settings, request)]
    agent.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    amounts = {"cpu": f"{round(machine.cpus * 1000)}m", "memory": str(machine.memory)}
    if machine.gpus:
        amounts[machine.gpu_resource] = str(machine.gpus)
    given = agent.setdefault("resources", {})
    # Requests equal limits: the node then evicts such a pod last.
    for kind in ("requests", "limits"):
        given[kind] = {**given.get(kind, {}), **amounts}
    mounts = agent.setdefault("volumeMounts", [])
    if all(one.get("mountPath") != settings.state_dir for one in mounts):
        mounts.append({"name": _STATE, "mountPath": settings.state_dir})
        spec.setdefault("volumes", []).append({"name": _STATE, "emptyDir": {}})


def _environment(settings: KubernetesSettings, request: LaunchRequest) -> list[dict[str, Any]]:
    def field(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    def secret(name: str, key: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": request.instance, "key": key}}}

    ledger = [
        {"name": "MIZZEN_INSTANCE", "value": request.instance},
        field("MIZZEN_POD_UID", "metadata.uid"),
        {"name": "MIZZEN_NATIVE_ID", "value": f"{request.instance}.$(MIZZEN_POD_UID)"},
    ]
    return [
        *(ledger if request.join_token else []),
        field("MIZZEN_POD_IP", "status.podIP"),
        secret("MIZZEN_JOIN_TOKEN", _JOIN),
        secret("MIZZEN_TEMPORAL_API_KEY", _KEY),
        {"name": "MIZZEN_NOTICE_WINDOW_S", "value": str(settings.grace_s)},
    ]


def script(settings: KubernetesSettings, request: LaunchRequest) -> str:
    """Returns the shell script of the agent's container."""
    more = f'--platform kubernetes --once --state-dir {settings.state_dir}/agent --address "$MIZZEN_POD_IP"'
    prepare = settings.prepare.strip()
    lines = [
        "set -eu",
        *([prepare] if prepare else []),
        f"exec {settings.agent} {agent_flags(request)} {more} --ports {settings.ports}",
    ]
    return "\n".join(lines)


def secret_of(request: LaunchRequest, pod: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    """Returns the Secret of a pod. The cluster deletes it with the pod."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": request.instance, "labels": labels, "ownerReferences": [owner]},
        "immutable": True,
        "stringData": {_JOIN: request.join_token, _KEY: request.machine_key},
    }
