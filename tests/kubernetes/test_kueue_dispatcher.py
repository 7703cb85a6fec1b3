"""The dispatcher on a real API server, with minimal CRDs of our own writing: it is not tested on Kueue.

The tests apply what Kueue's controllers apply, under the same field manager.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from capacity.providers.kubernetes.api import KubernetesApi
from server.kueue.dispatcher import KueueDispatcher
from server.kueue.settings import DispatcherSettings
from tests.clusters.proxy import losing
from tests.kubernetes import kueue
from tests.kubernetes.cluster import RBAC, KubernetesCluster, cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.long, pytest.mark.timeout(600)]
MIZZEN = Path(sys.executable).parent / "mizzen"
A100 = {"gpus": 8, "gpu_type": "a100", "cpus": 64, "memory": "256GiB"}
CLUSTERS = {
    "cheap": {"region": "east", "machines": {"spot": 2}},
    "dear": {"region": "west", "machines": {"dear": 4}},
}
TYPES = {"spot": {**A100, "usd_per_h": 8}, "dear": {**A100, "usd_per_h": 16}}


@pytest.fixture(scope="module")
def there() -> Iterator[KubernetesCluster]:
    with cluster() as made:
        kueue.install(made)
        made.allow(RBAC.with_name("dispatcher-rbac.yaml"), "dispatcher")
        kueue.multikueue(made, "cheap", "dear")
        yield made


@pytest.fixture(autouse=True)
def _empty(there: KubernetesCluster) -> Iterator[None]:
    """After each test no Workload is left."""
    yield
    there.call("DELETE", kueue.path_of())
    there.until(lambda: not _all(there), "all Workloads are gone")


def _all(there: KubernetesCluster) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in there.call("GET", kueue.path_of())["items"]}


def _nominated(there: KubernetesCluster, name: str) -> list[str]:
    return list(_all(there)[name].get("status", {}).get("nominatedClusterNames") or [])


def _settings(there: KubernetesCluster, **more: Any) -> dict[str, Any]:
    path = there.folder / "dispatcher.kubeconfig"
    given = {"kubeconfig": str(path), "machine_types": TYPES, "clusters": CLUSTERS, "tables": {"t": ["west"]}}
    return {**given, "interval_s": 0.5, "timeout_s": 10, **more}


@contextlib.contextmanager
def _dispatching(there: KubernetesCluster, **more: Any) -> Iterator[None]:
    """Runs a dispatcher with the rights of deploy/kubernetes/dispatcher-rbac.yaml."""
    settings = DispatcherSettings.model_validate(_settings(there, **more))
    api, stop = KubernetesApi("kueue", settings), threading.Event()
    tables = {name: frozenset(regions) for name, regions in settings.tables.items()}
    thread = threading.Thread(target=KueueDispatcher(api, lambda: settings, lambda: tables).run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        api.close()


def _admit(there: KubernetesCluster, name: str, cluster: str) -> None:
    """Sets the cluster that admitted a Workload and clears the nominations, as Kueue does in one apply."""
    kueue.apply_status(there, name, kueue.reserved(clusterName=cluster))


def test_nominations_and_what_kueue_does_with_them(there: KubernetesCluster) -> None:
    """Price, data, room and queue decide; the fields that Kueue applied stay, and Kueue can clear the nominations."""
    before = kueue.reserved()
    with _dispatching(there, next_cluster_s=3):
        kueue.submit(there, "first", 8)
        there.until(lambda: _nominated(there, "first") == ["cheap"], "the cheapest cluster is nominated")
        status = _all(there)["first"]["status"]
        assert {key: status[key] for key in before} == before
        kueue.submit(there, "data", 8, tables="t")
        there.until(lambda: _nominated(there, "data") == ["dear"], "the cluster with the table is nominated")
        kueue.submit(there, "unknown", 8, tables="t,u")
        kueue.submit(there, "second", 8)
        there.until(lambda: _nominated(there, "second")[:1] == ["cheap"], "it still has room")
        kueue.submit(there, "third", 8)
        there.until(lambda: _nominated(there, "third") == ["dear"], "the cheap cluster is full")
        there.until(lambda: _nominated(there, "second") == ["cheap", "dear"], "an overdue Workload gets one more")
        _admit(there, "first", "cheap")
        after = _all(there)["first"]["status"]
        assert (after["clusterName"], "nominatedClusterNames" in after) == ("cheap", False)
        assert _nominated(there, "unknown") == []
    with _dispatching(there):
        kueue.set_active(there, "cheap", holds=False)
        there.until(lambda: _nominated(there, "second") == ["dear"], "a cluster that is gone is nominated no more")
        kueue.set_active(there, "cheap", holds=True)
        assert _all(there)["first"]["status"] == after


def test_two_dispatchers_and_lost_answers(there: KubernetesCluster, tmp_path: Path) -> None:
    """Two dispatchers, one of which loses three in four writes, nominate each Workload once, for one cluster.

    Meanwhile Kueue and others write to the same Workloads: none of their fields is lost.
    """
    history: dict[str, list[list[str]]] = {}
    api = KubernetesApi("test", DispatcherSettings.model_validate(_settings(there)))
    _, version = api.objects(f"{kueue.ROOT}/workloads")

    def record() -> None:
        for kind, found in api.watch(f"{kueue.ROOT}/workloads", version, "", 300):
            if kind == "BOOKMARK":
                continue
            if found["metadata"]["name"] == "end":
                return
            nominated = found.get("status", {}).get("nominatedClusterNames")
            seen = history.setdefault(found["metadata"]["name"], [])
            if nominated is not None and nominated not in seen[-1:]:
                seen.append(nominated)

    watching = threading.Thread(target=record)
    watching.start()
    with (
        losing(there.url, 1, "PATCH") as bad,
        _dispatching(there),
        _dispatching(there, kubeconfig=str(there.kubeconfig_at(bad, "dispatcher"))),
    ):
        for k in range(24):
            kueue.submit(there, f"w{k}", 2)
            there.patch(kueue.path_of(f"w{k}"), {"metadata": {"labels": {"by": "others"}}})
        there.until(lambda: all(_nominated(there, f"w{k}") for k in range(24)), "all are nominated", 120)
    there.call(
        "POST",
        kueue.path_of(),
        {"apiVersion": f"{kueue.GROUP}/{kueue.VERSION}", "kind": "Workload", "metadata": {"name": "end"}, "spec": {}},
    )
    watching.join()
    there.call("DELETE", kueue.path_of("end"))
    api.close()
    assert all(len(seen) == 1 and len(seen[0]) == 1 for seen in history.values()), history
    # Eight fit in the cheap cluster. A dispatcher that has not seen the last nomination may add to them.
    assert [seen[0][0] for seen in history.values()].count("cheap") >= 8 and len(history) == 24
    for one in _all(there).values():
        assert one["metadata"]["labels"] == {"by": "others"}
        assert {key: one["status"][key] for key in kueue.reserved()} == kueue.reserved()


def test_a_restart_between_nomination_and_admission(there: KubernetesCluster, tmp_path: Path) -> None:
    """A dispatcher that is killed after a nomination changes nothing when it starts again, and then counts it."""
    (config := tmp_path / "dispatcher.yaml").write_text(yaml.safe_dump(_settings(there)))
    kueue.submit(there, "first", 8)
    kueue.submit(there, "large", 8, priority=1)
    process = subprocess.Popen([MIZZEN, "kueue-dispatcher", "--config", config])
    try:
        there.until(lambda: _nominated(there, "first") and _nominated(there, "large"), "both are nominated", 120)
    finally:
        process.kill()
        process.wait()
    before = {name: json.dumps(one) for name, one in _all(there).items()}
    kueue.submit(there, "later", 8)
    _admit(there, "large", "cheap")
    once = [MIZZEN, "kueue-dispatcher", "--config", config, "--once"]
    subprocess.run(once, check=True, timeout=120)
    assert _nominated(there, "later") == ["dear"]
    assert json.dumps(_all(there)["first"]) == before["first"]
    subprocess.run(once, check=True, timeout=120)
    assert _nominated(there, "later") == ["dear"]


def test_a_watch_that_expired(there: KubernetesCluster) -> None:
    """After the API server was away and has forgotten old versions, the dispatcher lists again and goes on."""
    with _dispatching(there):
        kueue.submit(there, "first", 8)
        there.until(lambda: _nominated(there, "first") == ["cheap"], "it is nominated")
        there.kill("kube-apiserver")
        there.compact()
        there.start_api()
        kueue.submit(there, "second", 8)
        there.until(lambda: _nominated(there, "second") == ["cheap"], "it is nominated", 120)


def test_the_rights_are_the_least(there: KubernetesCluster) -> None:
    """The dispatcher may neither change nor delete Workloads, nor read pods or secrets."""
    kueue.submit(there, "first", 8)
    for method, path in (
        ("DELETE", kueue.path_of("first")),
        ("PATCH", kueue.path_of("first")),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/secrets"),
        ("DELETE", f"{kueue.ROOT}/admissionchecks/{kueue.CHECK}"),
    ):
        assert there.status_as_mizzen(method, path, "dispatcher") == 403
    assert there.status_as_mizzen("GET", kueue.path_of("first"), "dispatcher") == 200
