"""The settings of a Kubernetes cluster."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator

from capacity.providers.offered_zones import PricedShape
from domain.capacity import CapacityKind
from domain.documents import DocumentPart, Name

Line = Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\n\x00]*$")]
AGENT = "agent"
"""The name of the container that the provider completes, or adds to the template."""

_COMPLETED: dict[str, type] = {"nodeSelector": dict, "tolerations": list, "volumes": list}
_OF_AGENT: dict[str, type] = {"env": list, "volumeMounts": list, "resources": dict}
"""The fields of a template's spec, and of the agent's container, to which the provider adds, with their types."""


class KubernetesMachineType(PricedShape):
    """The resources of a pod, all of which its machine offers, and the price of such a machine."""

    gpu_resource: Line = "nvidia.com/gpu"
    """The name of the extended resource of its GPUs."""
    node_selector: dict[str, str] = {}
    """Labels of nodes, in addition to the zone's."""


class ClusterAccess(DocumentPart):
    """How the API server of a cluster is reached."""

    kubeconfig: Path | None = None
    """None: the service account of the pod in which mizzen runs, else `KUBECONFIG`, else `~/.kube/config`."""
    context: str | None = None
    """The context of the file; None: its current one."""
    timeout_s: float = Field(20.0, gt=0, le=100)
    """The timeout of a request."""


class KubernetesZone(DocumentPart):
    """A set of nodes, which is a zone for pools, and the common settings of its pods."""

    kind: CapacityKind = CapacityKind.RESERVED
    """`spot`, if the cluster may take the nodes, or preempts pods of this priority."""
    price_factor: float = Field(1.0, ge=0)
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    priority_class: str | None = None
    queue: Name | None = None
    """A LocalQueue of Kueue in the namespace, by whose quota the pods are admitted."""


class KubernetesSettings(ClusterAccess):
    """A namespace of a Kubernetes cluster whose pods belong to one region."""

    region: Name
    """The mizzen region."""
    zones: dict[Name, KubernetesZone] = Field(min_length=1)
    machine_types: dict[Name, KubernetesMachineType] = Field(min_length=1)
    namespace: Name
    image: Line
    """The image of the agent's container; it contains mizzen and `/bin/sh`."""
    agent: Line
    """The command that starts the agent, with the flags that all machines share, such as `mizzen agent --temporal
    temporal.example.com:7233`."""
    prepare: str = ""
    """Shell commands before the agent is started."""
    template: dict[str, Any] = {}
    """A pod template (`metadata` and `spec`), which the provider completes. A container `agent` in it becomes that of
    the agent."""
    grace_s: int = Field(120, ge=1, le=86400)
    """`terminationGracePeriodSeconds` of the pods: the time from a deletion or an eviction to SIGKILL."""
    state_dir: Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9_./-]*[A-Za-z0-9]$")] = "/var/lib/mizzen"
    """Where the volume of the agent's state is mounted, an `emptyDir` unless the template has a mount there."""
    ports: Annotated[str, StringConstraints(pattern=r"^([0-9]+-[0-9]+|\$[A-Za-z_][A-Za-z0-9_]*)$")] = "20000-20999"
    """The range of ports for rendezvous and services, or a variable of the container, such as `$PORTS`."""
    start_s: float = Field(60.0, ge=0)
    """The expected time from the creation of a pod until its agent announces itself."""
    start_limit_s: float = Field(900.0, gt=0)
    """A pod is replaced if the container of its agent has not started within this time from its placement on a node,
    for example because there is no such image."""

    @field_validator("template")
    @classmethod
    def _of_a_pod(cls, template: dict[str, Any]) -> dict[str, Any]:
        unknown = template.keys() - {"metadata", "spec"}
        parts = [template.get("metadata", {}), template.get("spec", {})]
        if unknown or not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"must have the objects metadata and spec only; it has {', '.join(sorted(template))}")
        containers = parts[1].get("containers", [])
        if not isinstance(containers, list) or not all(isinstance(one, dict) and one.get("name") for one in containers):
            raise ValueError("spec.containers must be a list of objects with names")
        agent: dict[str, Any] = next((one for one in containers if one["name"] == AGENT), {})
        # The fields to which the provider adds; the API server checks all others.
        given: dict[str, tuple[Any, type]] = {"metadata.labels": (parts[0].get("labels", {}), dict)}
        given |= {f"spec.{name}": (parts[1].get(name, kind()), kind) for name, kind in _COMPLETED.items()}
        given |= {
            f"spec.containers.{AGENT}.{name}": (agent.get(name, kind()), kind) for name, kind in _OF_AGENT.items()
        }
        for where, (value, kind) in given.items():
            if not isinstance(value, kind):
                raise ValueError(f"{where} must be {'an object' if kind is dict else 'a list'}; it is {value!r}")
        return template
