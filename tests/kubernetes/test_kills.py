"""Pods, nodes, the parts of a cluster and mizzen's processes are killed at random while gangs run on pods.

`make test-all` makes one fault of each kind; `make chaos-kubernetes` makes 200 of each kind in ten rounds.
`MIZZEN_CHAOS_ROUNDS` is the number of rounds.
"""

import os
from pathlib import Path

import pytest

from tests.clusters.kills import EACH, run_faults
from tests.kubernetes.cluster import cluster
from tests.kubernetes.faults import KubernetesFaults
from tests.kubernetes.kubelet import nodes
from tests.kubernetes.relay import relay
from tests.kubernetes.site import KubernetesSite
from tests.kubernetes.test_departures import TOLERATIONS

pytestmark = [pytest.mark.kubernetes, pytest.mark.chaos, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(3600)]
ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "0"))
FAULTS = EACH if ROUNDS else 1


@pytest.mark.parametrize("seed", range(1, max(1, ROUNDS) + 1))
def test_kills(tmp_path: Path, seed: int) -> None:
    """After all faults, all gangs have ended as their tasks did, and the cluster has the ledger's pods, each once."""
    with cluster(watch_cache=False) as there, nodes(there, 4) as kubelets, relay(there) as (cut, kubeconfig):
        template = {"spec": {"tolerations": TOLERATIONS}}
        made = KubernetesSite(
            there, kubelets, tmp_path / "site", 60, grace_s=6, template=template, kubeconfig=str(kubeconfig)
        )
        made.start()
        made.pool(size=0, max_size=8, idle_s=10, zones=["batch"])
        twice = run_faults(
            made, tmp_path, FAULTS, seed,
            lambda scratch, seen: KubernetesFaults(made, cut, scratch, seen, seed),
        )  # fmt: skip
    logs = (tmp_path / "site" / "data" / "run" / "log").glob("*")
    expired = sum(log.read_text(errors="replace").count("expired; listing again") for log in logs)
    print(f"seed {seed}: {expired} watches had expired")
    assert expired >= FAULTS // 2, "a worker that was just started has no watch yet, but most have one"
    assert not twice
