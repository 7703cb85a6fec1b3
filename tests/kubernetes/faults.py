"""Faults of pods, nodes and the parts of a Kubernetes cluster."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.chaos.observed import Observed
from tests.clusters.faults import ClusterFaults
from tests.kubernetes.cluster import pod_path
from tests.kubernetes.relay import Relay
from tests.kubernetes.site import KubernetesSite


class KubernetesFaults(ClusterFaults):
    """See `ClusterFaults`."""

    kinds = ("agent", "deletion", "removal", "node", "apiserver", "managers", "expiry", "mizzen")
    harmless = ("apiserver", "managers", "expiry", "mizzen")

    def __init__(self, there: KubernetesSite, relay: Relay, scratch: Path, seen: Observed, seed: int) -> None:
        """`relay`: through which mizzen reaches the API server."""
        super().__init__(there.up, scratch, seen, seed)
        self._cluster, self._nodes, self._relay = there.cluster, there.nodes, relay
        self._silent: set[str] = set()

    # ------------------------------------------------------------------------------------------------------------ pods

    def _agent(self) -> bool:
        """The agent dies, and with it the pod."""
        agents = [pid for one in list(self._nodes.containers.values()) if (pid := one.agent()) is not None]
        if not agents:
            return False
        os.kill(self._chance.choice(agents), signal.SIGKILL)
        return True

    def _deletion(self) -> bool:
        """A pod is deleted with its grace period."""
        return self._delete({})

    def _removal(self) -> bool:
        """A pod is deleted without a grace period: its object is gone before its processes."""
        return self._delete({"gracePeriodSeconds": 0})

    def _delete(self, options: dict[str, Any]) -> bool:
        there = [name for name, pod in self._cluster.pods().items() if "deletionTimestamp" not in pod["metadata"]]
        if not there:
            return False
        self._cluster.call("DELETE", pod_path(self._chance.choice(there)), options)
        return True

    # ----------------------------------------------------------------------------------------------------------- nodes

    def _node(self) -> bool:
        """A node does not answer for a while; every second time its containers die at once."""
        used = {one.pod["spec"]["nodeName"] for one in list(self._nodes.containers.values())} - self._silent
        if not used:
            return False
        node = self._chance.choice(sorted(used))
        self._nodes.silence(node, kill=self._chance.random() < 0.5)
        self._silent.add(node)
        self._later(self._chance.uniform(2, 20), lambda: self._resume(node))
        return True

    def _resume(self, node: str) -> None:
        self._nodes.resume(node)
        self._silent.remove(node)

    # ----------------------------------------------------------------------------------------------- the control plane

    def _apiserver(self) -> bool:
        self._cluster.pods()  # It answers.
        return self._kill("kube-apiserver", 5)

    def _managers(self) -> bool:
        return self._kill(self._chance.choice(("kube-scheduler", "kube-controller-manager")), 10)

    def _kill(self, program: str, most_s: float) -> bool:
        if not self._cluster.runs(program):
            return False
        self._cluster.kill(program)
        self._later(self._chance.uniform(0, most_s), lambda: self._cluster.start_again(program))
        return True

    def _expiry(self) -> bool:
        """The watch is interrupted, and the cluster has forgotten the versions from which it could be continued."""
        self._cluster.compact()
        return self._relay.cut() > 0

    def _tidy(self) -> None:
        """Managers that are started while the API server does not answer end after some seconds."""
        self._cluster.revive()
