"""Pods of a queue of Kueue on a real API server, with minimal CRDs of our own writing instead of Kueue; the chart."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from capacity.provider import FoundMachine
from capacity.providers.kubernetes import KubernetesProvider
from tests.capacity.requests import request_for
from tests.kubernetes.bench import provider_on
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster, cluster, pod_path
from tests.kubernetes.kueue import GROUP, apply_status, condition, install, path_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def there() -> Iterator[KubernetesCluster]:
    with cluster() as made:
        yield made


def _only(provider: KubernetesProvider) -> FoundMachine:
    (found,) = provider.describe()
    return found


def test_a_pod_waits_and_ends_in_the_words_of_kueue(there: KubernetesCluster) -> None:
    """Without Kueue a pod with a queue waits in the scheduler's words, with it in those of its Workload's conditions.

    A pod that Kueue ends has Kueue's reason, and mizzen may list Workloads but not change them.
    """
    provider = provider_on(there, zones={"batch": {"queue": "team-a"}})
    native_id = provider.launch(request_for(provider.offers()[0]))
    name, _, uid = native_id.partition(".")
    assert there.pods()[name]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    there.until(lambda: "no nodes available" in (_only(provider).waits or ""), "it waits for a node")
    provider.close()

    install(there)
    provider = provider_on(there, zones={"batch": {"queue": "team-a"}})
    assert "no nodes available" in (_only(provider).waits or "")
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
    workload = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "spec": {"queueName": "team-a"}}
    there.call("POST", path_of(), {**workload, "metadata": {"name": "pod-1", "ownerReferences": [owner]}})
    missing = "LocalQueue team-a doesn't exist"
    quota = "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu"
    for status, words in (
        ({"conditions": [condition("QuotaReserved", "Pending", quota, holds=False)]}, f"QuotaPending: {quota}"),
        (
            {"conditions": [condition("QuotaReserved", "Inadmissible", missing, holds=False)]},
            f"QueueInadmissible: {missing}",
        ),
        (
            {
                "conditions": [condition("QuotaReserved", "QuotaReserved")],
                "admissionChecks": [{"name": "nodes", "state": "Pending", "message": "scaling up"}],
            },
            "AdmissionChecks: nodes is Pending: scaling up",
        ),
        ({"conditions": [condition("Evicted", "PodsReadyTimeout", "not ready")]}, "QueuePodsReadyTimeout: not ready"),
    ):
        apply_status(there, "pod-1", status)
        assert _only(provider).waits == words
    apply_status(there, "pod-1", {"conditions": [condition("QuotaReserved", "x"), condition("Admitted", "x")]})
    assert "no nodes available" in (_only(provider).waits or "")
    assert there.status_as_mizzen("GET", path_of()) == 200
    assert there.status_as_mizzen("DELETE", path_of("pod-1")) == 403

    words = "Preempted to accommodate a workload (UID: 1) due to prioritization in the ClusterQueue"
    target = condition("TerminationTarget", "WorkloadEvictedDueToPreempted", words)
    there.patch(f"{pod_path(name)}/status", {"status": {"conditions": [target]}})
    there.call("DELETE", pod_path(name))
    assert there.until(lambda: _only(provider).ended, "it has ended") == f"Preempted: {words}"
    provider.close()


def test_the_chart_on_a_server(there: KubernetesCluster) -> None:
    """The API server accepts all objects of the Helm chart, and its accounts have the rights that they need only."""
    python = Path(__file__).parents[2] / ".venv-deploy" / "bin" / "python"
    if not python.exists():
        pytest.skip("Helm is not installed (make test-deploy installs it)")
    given = {
        "regions": {"east": "s3://east/mizzen"},
        "podNamespaces": [NAMESPACE],
        "dispatcher": {"settings": {"machine_types": {"m": {}}, "clusters": {"w": {}}}},
    }
    chart = Path(__file__).parents[2] / "deploy" / "helm" / "mizzen"
    out = subprocess.run(
        [python, "-c", _RENDER, chart, json.dumps(given)], check=True, capture_output=True, timeout=120
    )
    objects = json.loads(out.stdout)
    assert len(objects) >= 14
    for one in objects:
        root = "/api/v1" if one["apiVersion"] == "v1" else f"/apis/{one['apiVersion']}"
        if not one["kind"].startswith("Cluster"):
            root += f"/namespaces/{one['metadata'].get('namespace', 'default')}"
        there.call("POST", f"{root}/{one['kind'].lower()}s", one)
    there.until(lambda: _may(there, "control", "create", "pods", NAMESPACE), "the roles are in effect")
    assert not _may(there, "control", "create", "pods", "default")
    assert not _may(there, "control", "get", "secrets", NAMESPACE)
    assert _may(there, "dispatcher", "patch", "workloads/status", NAMESPACE)
    assert not _may(there, "dispatcher", "patch", "workloads", NAMESPACE)
    assert not _may(there, "dispatcher", "list", "pods", NAMESPACE)


_RENDER = """
import json, sys, helm_python, yaml
files = helm_python.Chart.load(sys.argv[1]).render(json.loads(sys.argv[2]))
print(json.dumps([found for text in files.values() for found in yaml.safe_load_all(text) if found]))
"""


def _may(there: KubernetesCluster, account: str, verb: str, resource: str, namespace: str) -> bool:
    """Returns whether a service account of the release may do this."""
    name, _, part = resource.partition("/")
    group = GROUP if name == "workloads" else ""
    asked = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": part}
    spec = {"user": f"system:serviceaccount:default:release-name-{account}", "resourceAttributes": asked}
    answer = there.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec})
    return bool(answer["status"]["allowed"])
