"""An installation whose machines are pods of a Kubernetes cluster, all on this computer."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.clusters.site import ClusterSite
from tests.kubernetes.bench import settings_for
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster, cluster
from tests.kubernetes.kubelet import Nodes, nodes

_SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets?labelSelector=mizzen.io/provider"


class KubernetesSite(ClusterSite):
    """See `ClusterSite`."""

    def __init__(
        self, there: KubernetesCluster, kubelets: Nodes, folder: Path, lost_after_s: float = 600, **provider: Any
    ) -> None:
        """`provider`: changed settings of the provider `site`."""
        super().__init__(folder, "cloud", "pods", lost_after_s=lost_after_s)
        self.cluster, self.nodes = there, kubelets
        self.add_provider("kubernetes", settings_for(there, **{"region": "cloud", "agent": self.agent, **provider}))

    def machines(self) -> list[str]:
        """See `ClusterSite.machines`."""
        return [f"{name}.{pod['metadata']['uid']}" for name, pod in self.cluster.pods().items()]

    def ever(self) -> Counter[str]:
        """See `ClusterSite.ever`."""
        return Counter(self.nodes.started)

    def secrets(self) -> list[str]:
        """See `ClusterSite.secrets`."""
        return [one["metadata"]["name"] for one in self.cluster.call("GET", _SECRETS)["items"]]

    def states(self) -> Iterator[Path]:
        """See `ClusterSite.states`."""
        return self.cluster.folder.glob("pods/*/state/agent")


@contextlib.contextmanager
def site(folder: Path, count: int = 2, **provider: Any) -> Iterator[KubernetesSite]:
    """Yields a site whose cluster runs with this many nodes."""
    with cluster() as there, nodes(there, count) as kubelets:
        made = KubernetesSite(there, kubelets, folder, **provider)
        try:
            yield made
        finally:
            made.close()
