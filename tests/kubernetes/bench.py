"""A provider on a real Kubernetes cluster, whose pods only sleep."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from capacity.providers.kubernetes import KubernetesProvider, SettingsOf
from tests.capacity.bench import Bench
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster, cluster, missing
from tests.kubernetes.kubelet import IMAGE, nodes

ZONES = {"batch": {"kind": "spot"}, "urgent": {"price_factor": 2}}
SLEEP = "sh -c 'trap \"exit 0\" TERM; sleep 600 & wait' #"
"""Stands for an agent: it ends at SIGTERM."""


def settings_for(there: KubernetesCluster, **more: Any) -> dict[str, Any]:
    """Returns the settings of a provider on a cluster. Its machines have half of a node's CPUs and GPUs."""
    return {
        "region": "west",
        "zones": ZONES,
        "machine_types": {"half": {"gpus": 1, "gpu_type": "a100", "cpus": 2, "memory": "1GiB", "usd_per_h": 1.0}},
        "namespace": NAMESPACE,
        "image": IMAGE,
        "agent": SLEEP,
        "grace_s": 20,
        "state_dir": str(there.folder / "state"),
        "ports": "$TEST_PORTS",
        "kubeconfig": str(there.kubeconfig),
        "timeout_s": 10,
        **more,
    }


def provider_on(there: KubernetesCluster, **more: Any) -> KubernetesProvider:
    """Returns a provider on a cluster."""
    return KubernetesProvider("k8s", SettingsOf.model_validate(settings_for(there, **more)), "0123456789abcdef")


@contextmanager
def kubernetes(_: Path) -> Iterator[Bench]:
    """Yields a bench on a cluster of one node, which holds two pods."""
    if (why := missing()) is not None:
        pytest.skip(why)
    with cluster() as there, nodes(there, 1):

        @contextmanager
        def away() -> Iterator[None]:
            there.kill("kube-apiserver")
            yield
            there.start_api()

        provider = provider_on(there)
        try:
            yield Bench(provider, away)
        finally:
            provider.close()
