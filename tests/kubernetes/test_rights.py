"""Rights that the role of mizzen lacks, and a namespace that is deleted: what pools and instances say meanwhile."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.cluster import NAMESPACE, RBAC, cluster
from tests.kubernetes.kubelet import nodes
from tests.kubernetes.relay import Relay, relay
from tests.kubernetes.site import KubernetesSite, site
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]
_ROLE = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/mizzen-pods"


@contextlib.contextmanager
def _without(there: KubernetesSite, verb: str, resource: str) -> Iterator[str]:
    """Takes a right away; yields what the API server says then."""
    (role,) = [one for one in yaml.safe_load_all(RBAC.read_text()) if one["kind"] == "Role"]
    less = [
        {**rule, "verbs": [one for one in rule["verbs"] if one != verb]} if rule["resources"] == [resource] else rule
        for rule in role["rules"]
    ]
    there.cluster.patch(_ROLE, {"rules": [rule for rule in less if rule["verbs"]]})
    try:
        yield f'cannot {verb} resource "{resource}"'
    finally:
        there.cluster.patch(_ROLE, {"rules": role["rules"]})


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[KubernetesSite, Relay]]:
    """A site whose pool grows, and the relay through which it reaches the API server."""
    with cluster() as made, nodes(made, 2) as kubelets, relay(made) as (cut, kubeconfig):
        installation = KubernetesSite(made, kubelets, tmp_path / "site", kubeconfig=str(kubeconfig))
        try:
            installation.start()
            installation.pool(size=0, max_size=4, idle_s=5, zones=["batch"])
            yield installation, cut
        finally:
            installation.close()


def test_rights_that_are_missing(there: tuple[KubernetesSite, Relay], tmp_path: Path) -> None:
    """Without a right, the pool or an instance names it, nothing is lost, and nothing is created twice."""
    installation, cut = there
    workload = installation.up.submit("stays", 100_000, 0.1, gate=tmp_path / "gate")
    wait_until(lambda: installation.up.phase(workload) == "running", "it runs", 150)
    before = installation.ids()
    for verb in ("list", "watch"):
        with _without(installation, verb, "pods") as words:
            cut.cut()  # A watch that was allowed goes on.
            wait_until(lambda: words in installation.why(), f"the pool names the right to {verb}", 60)
        wait_until(lambda: not installation.why(), "the pool has no reason any more", 90)
    for resource in ("pods", "secrets"):
        with _without(installation, "create", resource) as words:
            other = installation.up.submit(resource, 10, 0.1)
            wait_until(lambda: words in installation.why(), f"the pool names the right to create {resource}", 90)
            waits = [one["sentence"] for one in installation.up.client().why(other)["reasons"]]
            assert any(words in sentence for sentence in waits), waits
        wait_until(lambda: installation.up.ended(other), "the other one has run", 150)  # noqa: B023
        ends = "patch" if resource == "pods" else "delete"
        with _without(installation, ends, "pods") as words:

            def said(words: str = words) -> bool:
                return any(words in str(one["reason"]["sentence"]) for one in installation.instances())

            wait_until(said, f"the idle instance names the right to {ends}", 90)
        wait_until(lambda: installation.ids() == before and installation.settled(), "the idle pod has ended", 120)
    assert installation.up.phase(workload) == "running"
    assert {int(one["attempt"]) for one in installation.up.client().allocations(workload)} == {1}
    assert set(installation.ever().values()) == {1}


def test_a_namespace_is_deleted(tmp_path: Path) -> None:
    """Gangs save before their pods end; the pool says what is refused; in a new namespace with the role all goes on."""
    with site(tmp_path / "site") as there:
        there.start()
        there.pool(size=0, max_size=4, idle_s=5, zones=["batch"])
        workload = there.up.submit("gang", 100_000, 0.1, tasks=2, gate=tmp_path / "gate")
        wait_until(lambda: there.up.phase(workload) == "running", "it runs", 150)
        wait_until(lambda: there.up.saved_step(workload) is not None, "it has saved")
        namespace = f"/api/v1/namespaces/{NAMESPACE}"
        there.cluster.call("DELETE", namespace)
        wait_until(lambda: "is forbidden" in there.why(), "the pool says what is refused", 90)
        wait_until(lambda: there.up.phase(workload) != "running", "its pods have ended", 90)

        def made() -> bool:
            there.cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            return True

        there.cluster.until(made, "the namespace is gone, and made again", 120)
        there.cluster.allow(RBAC, "mizzen")
        wait_until(lambda: there.up.phase(workload) == "running", "it runs again", 240)
        wait_until(lambda: there.up.client().attempts(workload)[1]["checkpoint_step"], "it has saved again")
        first, second = there.up.client().attempts(workload)
        assert second["resumed_step"] == first["checkpoint_step"] > 0
        wait_until(there.settled, "the cluster has the ledger's pods", 120)
        assert set(there.ever().values()) == {1}
