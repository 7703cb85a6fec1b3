"""An installation whose machines are pods of a Kubernetes cluster, all on this computer."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from agent.fleet import power_off
from tests.kubernetes.bench import settings_for
from tests.kubernetes.cluster import KubernetesCluster, cluster
from tests.kubernetes.kubelet import Nodes, nodes
from tests.stack.harness import Up, wait_until

FLEET = "{version: 1, regions: [{name: cloud, clusters: []}]}"
CAPACITY = {"interval_s": 1, "refused_pause_s": 3, "drain_s": 60, "no_work_s": 20, "leave_s": 10, "lost_after_s": 600}


class KubernetesSite:
    """A stack, not started yet, and a cluster that runs."""

    def __init__(self, there: KubernetesCluster, kubelets: Nodes, folder: Path, **provider: Any) -> None:
        """`provider`: changed settings of the provider `site`."""
        self.cluster, self.nodes = there, kubelets
        self.up = Up(folder, FLEET, settings=yaml.safe_dump({"capacity": CAPACITY}))
        mizzen = Path(sys.executable).parent / "mizzen"
        agent = f"{mizzen} agent --config {self.up.data}/run/agents.yaml"
        body = settings_for(there, **{"region": "cloud", "agent": agent, **provider})
        config = folder / "config.yaml"
        config.write_text(config.read_text() + yaml.safe_dump({"providers": {"site": {"kind": "kubernetes", **body}}}))

    def start(self) -> None:
        """Starts the stack, with a tenant."""
        self.up.start(timeout_s=240)
        self.up.client().set_tenant("t", 3, {"a100": 16}, None)

    def pool(self, **rules: Any) -> None:
        """Sets the rules of the pool `pods`."""
        self.up.client().set_pool("cloud", "pods", **rules)

    def instances(self, *, gone: bool = False) -> list[dict[str, Any]]:
        """Returns the instances, the newest first."""
        return list(self.up.client().instances(gone=gone))

    def until_ready(self, count: int) -> list[dict[str, Any]]:
        """Waits until this many instances are ready; returns them."""
        wait_until(lambda: len(self._ready()) >= count, f"{count} pods are ready")
        return self._ready()

    def _ready(self) -> list[dict[str, Any]]:
        return [one for one in self.instances() if one["phase"] == "ready"]

    def close(self) -> None:
        """Ends the stack, and what tasks of pods left."""
        self.up.close()
        for folder in self.cluster.folder.glob("pods/*/state/agent"):
            power_off(folder)


@contextlib.contextmanager
def site(folder: Path, count: int = 2, **provider: Any) -> Iterator[KubernetesSite]:
    """Yields a site whose cluster runs with this many nodes."""
    with cluster() as there, nodes(there, count) as kubelets:
        made = KubernetesSite(there, kubelets, folder, **provider)
        try:
            yield made
        finally:
            made.close()
