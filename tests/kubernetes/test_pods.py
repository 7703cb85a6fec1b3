"""Pods on a real API server and scheduler: created once, and what their states say."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from capacity.ledger_audit import LedgerEntry, compare
from capacity.offers import Offer
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, ProviderUnavailable, Refusal
from capacity.providers.kubernetes import KubernetesProvider
from tests.capacity.requests import request_for
from tests.clusters.proxy import losing
from tests.kubernetes.bench import SLEEP, provider_on
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster, cluster, pod_path
from tests.kubernetes.kubelet import Nodes, nodes

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.timeout(900)]
CREATIONS = 200


@pytest.fixture(scope="module")
def there() -> Iterator[KubernetesCluster]:
    with cluster() as made:
        yield made


@pytest.fixture(scope="module")
def kubelets(there: KubernetesCluster) -> Iterator[Nodes]:
    """The nodes of the cluster: one, which holds two pods."""
    with nodes(there, 1) as made:
        yield made


@pytest.fixture
def provider(there: KubernetesCluster, kubelets: Nodes) -> Iterator[KubernetesProvider]:
    """A provider. After the test its pods are gone."""
    made = provider_on(there)
    yield made
    made.close()
    _empty(there)


def _empty(there: KubernetesCluster) -> None:
    for name in there.pods():
        there.call("DELETE", pod_path(name), {"gracePeriodSeconds": 0})
    there.until(lambda: not there.pods(), "all pods are gone")


def _offer(provider: KubernetesProvider, zone: str = "batch") -> Offer:
    return next(offer for offer in provider.offers() if offer.zone == zone)


def _launch(provider: KubernetesProvider) -> str:
    return provider.launch(request_for(_offer(provider)))


def _of(provider: KubernetesProvider, native_id: str) -> FoundMachine:
    found = [one for one in provider.describe() if one.native_id == native_id]
    assert len(found) == 1, f"{len(found)} machines are pod {native_id}"
    return found[0]


def _until_runs(there: KubernetesCluster, provider: KubernetesProvider, *native_ids: str) -> None:
    for one in native_ids:
        there.until(lambda one=one: _of(provider, one).waits is None, f"pod {one} runs")  # type: ignore[misc]


def _name(native_id: str) -> str:
    return native_id.partition(".")[0]


def _until_ended(there: KubernetesCluster, provider: KubernetesProvider, native_id: str) -> str:
    return str(there.until(lambda: _of(provider, native_id).ended, f"pod {native_id} has ended"))


def test_lost_answers_create_nothing_twice(there: KubernetesCluster, kubelets: Nodes) -> None:
    """Of 200 creations of which three in four fail in some way, each gives one pod, and its id is known."""
    with losing(there.url, 1) as url:
        provider = provider_on(there, kubeconfig=str(there.kubeconfig_at(url)))

        def launched(request: LaunchRequest) -> str:
            while True:
                try:
                    return provider.launch(request)
                except ProviderUnavailable:
                    time.sleep(0.05)

        requests = [request_for(_offer(provider)) for _ in range(CREATIONS)]
        with ThreadPoolExecutor(4) as threads:
            ids = list(threads.map(launched, requests))
        ledger = {request.instance: LedgerEntry(one, 0.0) for request, one in zip(requests, ids, strict=True)}
        found = compare(ledger, provider.describe(), time.time(), 0.0)
        assert (found.strays, found.seconds, found.ended, found.missing) == ({}, {}, {}, [])
        there_now = {f"{name}.{pod['metadata']['uid']}" for name, pod in there.pods().items()}
        assert there_now == set(ids)
        provider.close()
    _empty(there)


def test_a_pod_that_finds_no_node_says_why(there: KubernetesCluster, provider: KubernetesProvider) -> None:
    """A pod without a node waits in the words of the scheduler; when another one ends, it runs."""
    first, second = _launch(provider), _launch(provider)
    _until_runs(there, provider, first, second)
    third = _launch(provider)
    words = there.until(
        lambda: _of(provider, third).waits if "Unsch" in str(_of(provider, third).waits) else None, "it"
    )
    assert "Unschedulable: 0/1 nodes are available: 1 Insufficient" in words
    provider.terminate(first)
    _until_runs(there, provider, third)


def test_an_image_that_does_not_exist(there: KubernetesCluster, kubelets: Nodes) -> None:
    """A pod whose image cannot be pulled waits with this reason, and is to be left after the limit."""
    provider = provider_on(there, image="no-such:image", start_limit_s=4)
    native_id = _launch(provider)
    there.until(lambda: "ImagePullBackOff" in (_of(provider, native_id).waits or ""), "the image is not found")
    assert _of(provider, native_id).leaves is None
    words = there.until(lambda: _of(provider, native_id).leaves, "it is to be left")
    assert 'ImagePullBackOff: Back-off pulling image "no-such:image", for' in words
    provider.close()
    _empty(there)


def test_a_quota_refuses(there: KubernetesCluster, provider: KubernetesProvider) -> None:
    """A ResourceQuota refuses a launch as a quota, in its words; a launch succeeds when there is room again."""
    quota = {"metadata": {"name": "two"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}}
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
    there.call("POST", path, quota)
    there.until(lambda: there.call("GET", f"{path}/two")["status"].get("used"), "the quota is counted")
    first = _launch(provider)
    with pytest.raises(LaunchRefused, match="exceeded quota: two, requested: requests") as raised:
        _launch(provider)
    assert raised.value.refusal is Refusal.QUOTA
    provider.terminate(first)
    there.until(lambda: not there.pods(), "the pod is gone")

    def launched() -> str | None:
        try:
            return _launch(provider)
        except LaunchRefused:
            return None

    there.until(launched, "the quota has room")
    there.call("DELETE", f"{path}/two")


def test_a_wrong_template_is_refused_for_good(there: KubernetesCluster, kubelets: Nodes) -> None:
    """A template that the API server does not accept, or a priority class that does not exist, is a wrong request."""
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"template": {"spec": {"dnsPolicy": "Nonsense"}}}, "dnsPolicy"),
        ({"zones": {"batch": {"priority_class": "no-such"}}}, "no-such"),
        ({"namespace": "elsewhere"}, "forbidden"),
    )
    for settings, words in wrong:
        provider = provider_on(there, **settings)
        with pytest.raises(LaunchRefused, match=words) as raised:
            _launch(provider)
        assert raised.value.refusal is Refusal.REQUEST
        provider.close()


def test_ends_have_their_reason(there: KubernetesCluster, kubelets: Nodes, provider: KubernetesProvider) -> None:
    """A container that used too much memory, an agent that failed, and one that ended, have these reasons."""
    first, second = _launch(provider), _launch(provider)
    _until_runs(there, provider, first, second)
    kubelets.oom(_name(first))
    assert _until_ended(there, provider, first).startswith("OOMKilled: ")
    there.call("DELETE", pod_path(_name(second)))
    assert _until_ended(there, provider, second) == "Deleted: the pod was deleted or evicted"
    provider.terminate(first)
    failing = provider_on(there, agent="sh -c 'echo no room on disk; exit 3' #")
    third = _launch(failing)
    assert _until_ended(there, failing, third) == "its agent ended with exit status 3: no room on disk"
    failing.close()


def test_a_deletion_with_grace_has_its_end(there: KubernetesCluster, provider: KubernetesProvider) -> None:
    """A pod that is deleted or evicted is to be left, and its end is the true deadline, also with another grace."""
    stubborn = provider_on(there, agent=SLEEP.replace("exit 0", ":").replace("wait", "wait; wait; wait"))
    for grace_s in (None, 7):
        native_id = _launch(stubborn)
        _until_runs(there, stubborn, native_id)
        body = {} if grace_s is None else {"deleteOptions": {"gracePeriodSeconds": grace_s}}
        began_s = time.time()
        there.evict(_name(native_id), **body)
        found = _of(stubborn, native_id)
        assert found.ends_at_s == pytest.approx(began_s + (20 if grace_s is None else grace_s), abs=2)
        assert found.leaves
        assert found.ended is None
        there.until(lambda native_id=native_id: _of(stubborn, native_id).ended, "it has ended")
    stubborn.close()


def test_preemption_and_a_lost_node(there: KubernetesCluster, kubelets: Nodes) -> None:
    """A pod that the scheduler preempts, and pods of a node that does not answer, say so before and after their end."""
    scheduling = "/apis/scheduling.k8s.io/v1/priorityclasses"
    there.call("POST", scheduling, {"metadata": {"name": "high"}, "value": 1000})
    zones = {"batch": {}, "urgent": {"priority_class": "high"}}
    template = {"spec": {"tolerations": [_soon("not-ready"), _soon("unreachable")]}}
    provider = provider_on(there, zones=zones, template=template)
    low = [_launch(provider), _launch(provider)]
    _until_runs(there, provider, *low)
    high = provider.launch(request_for(_offer(provider, "urgent")))
    there.until(lambda: any("Preempted: " in (_of(provider, one).ended or "") for one in low), "one is preempted")
    _until_runs(there, provider, high)
    kubelets.add("n2", gpus=0)  # If all nodes of a zone are silent, the cluster ends no pods.
    kubelets.silence("n1")
    there.until(lambda: _of(provider, high).leaves == "NodeLost: node n1 does not answer", "its node is lost", 90)
    assert _of(provider, high).ended is None
    kubelets.resume("n1")
    assert _until_ended(there, provider, high) == "NodeLost: node n1 does not answer"
    provider.close()
    _empty(there)


def _soon(taint: str) -> dict[str, Any]:
    return {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}


def test_a_watch_that_expired(
    there: KubernetesCluster, provider: KubernetesProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """A watch that is too old to be continued starts with a list, and the ends since then are known."""
    caplog.set_level(logging.INFO)
    first, second = _launch(provider), _launch(provider)
    _until_runs(there, provider, first, second)
    there.kill("kube-apiserver")
    with pytest.raises(ProviderUnavailable):
        provider.describe()
    there.compact()
    there.start_api()
    there.call("DELETE", pod_path(_name(first)), {"gracePeriodSeconds": 0})
    assert _until_ended(there, provider, first).startswith("Deleted: ")
    assert _of(provider, second).ended is None
    assert "the watch of pods expired" in caplog.text


def test_the_rights_are_the_least(there: KubernetesCluster, provider: KubernetesProvider) -> None:
    """The rights of deploy/kubernetes/rbac.yaml suffice; secrets, nodes and other namespaces cannot be read."""
    native_id = _launch(provider)
    path = f"/api/v1/namespaces/{NAMESPACE}"
    for refused in (f"{path}/secrets", f"{path}/secrets/{_name(native_id)}", "/api/v1/nodes", "/api/v1/pods"):
        assert there.status_as_mizzen("GET", refused) == 403
    assert there.status_as_mizzen("DELETE", f"{path}/secrets/{_name(native_id)}") == 403
    assert there.status_as_mizzen("GET", f"{path}/pods/{_name(native_id)}") == 200
    spec = there.pods()[_name(native_id)]["spec"]
    assert "secret" not in str(spec["containers"][0]["command"])
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
