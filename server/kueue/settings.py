"""The settings of the dispatcher: what the worker clusters have, and where tables are."""

from pydantic import Field, model_validator

from capacity.providers.kubernetes.settings import ClusterAccess, KubernetesMachineType
from domain.documents import DocumentPart, Name, RuleError
from domain.scheduling import MachineState
from gms.dispatch import WorkerCluster

_KNOWN = "machines names machine types of machine_types"
_MOST_MACHINES = 10_000


class DispatchedCluster(DocumentPart):
    """A worker cluster of MultiKueue."""

    region: Name | None = None
    """The region in which it reads tables. None: no table is near."""
    machines: dict[Name, int] = {}
    """The number of its nodes by machine type."""


class DispatcherSettings(ClusterAccess):
    """The settings of the dispatcher. `kubeconfig` is that of the manager cluster."""

    rules = (_KNOWN,)

    machine_types: dict[Name, KubernetesMachineType] = Field(min_length=1)
    clusters: dict[str, DispatchedCluster] = Field(min_length=1)
    """The worker clusters, by their names in MultiKueueConfigs."""
    tables: dict[str, list[Name]] = {}
    """The regions in which each table can be read, in addition to those of mizzen's catalogue."""
    next_cluster_s: float = Field(300.0, gt=0)
    """A workload that its nominated clusters have not admitted for this time gets one more."""
    patience_s: float = Field(900.0, ge=0)
    """A workload for which all clusters have been full for this time is nominated for the best one nevertheless."""
    interval_s: float = Field(15.0, gt=0)
    """Time between rounds, if no Workload changes."""

    @model_validator(mode="after")
    def _known(self) -> "DispatcherSettings":
        for name, cluster in self.clusters.items():
            unknown = cluster.machines.keys() - self.machine_types.keys()
            if unknown or not all(0 <= count <= _MOST_MACHINES for count in cluster.machines.values()):
                found = f"{_KNOWN}, with numbers of nodes up to {_MOST_MACHINES}; those of {name} do not"
                raise RuleError(_KNOWN, found)
        return self

    def workers(self) -> list[WorkerCluster]:
        """Returns the worker clusters with all their machines free.

        The machines of one type are a cluster of the auction, which has one price, so a pod set uses one type.
        """
        return [
            WorkerCluster(name, cluster.region or "", tuple(self._machines(name, cluster)))
            for name, cluster in sorted(self.clusters.items())
        ]

    def _machines(self, name: str, cluster: DispatchedCluster) -> list[MachineState]:
        made = []
        for kind, count in sorted(cluster.machines.items()):
            one = self.machine_types[kind]
            cpus_milli = round(one.cpus * 1000)
            gpu_usd_per_h = one.usd_per_h / one.gpus if one.gpus else 0.0
            core_usd_per_h = 0.0 if one.gpus else one.usd_per_h / one.cpus
            made += [
                MachineState(
                    f"{name}/{kind}/{k}", kind, kind, one.gpu_type, one.gpus, one.gpus,
                    cpus_milli, one.memory, cpus_milli, one.memory,
                    gpu_usd_per_h=gpu_usd_per_h, core_usd_per_h=core_usd_per_h,
                )
                for k in range(count)
            ]  # fmt: skip
        return made
