"""The controller: watches the Workloads of the manager cluster, and nominates worker clusters for those that wait."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.api import ApiRefused, KubernetesApi, Object
from capacity.providers.kubernetes.kueue import GROUP, VERSIONS
from capacity.providers.kubernetes.object_watch import ObjectWatch
from capacity.providers.kubernetes.status import seconds
from gms.dispatch import KueueWorkload, nominate
from infra.errors import StackError
from server.kueue.owned_fields import owned
from server.kueue.settings import DispatcherSettings
from server.kueue.workloads import UnusableWorkload, check_of, clusters_of, holds, jobs_of, tables_of

MANAGER = "kueue-admission"
"""The field manager under whose name Kueue clears the nominations, so they must be applied under it."""
_PAUSE_S = 0.2
"""Changes within this time are answered by one round."""
_log = logging.getLogger(__name__)
Tables = Mapping[str, frozenset[str]]


class KueueDispatcher:
    """Nominates clusters in rounds. Several dispatchers may run at once: a write on an outdated Workload is refused."""

    def __init__(
        self, api: KubernetesApi, settings: Callable[[], DispatcherSettings], tables: Callable[[], Tables]
    ) -> None:
        """Asks which version of Kueue's resources the cluster has.

        Raises:
            ProviderUnavailable: the API server does not answer.
            StackError: the cluster has no resources of Kueue.
        """
        version = api.version_of(GROUP, VERSIONS)
        if version is None:
            raise StackError(f"the cluster has no resources {GROUP} of a known version ({', '.join(VERSIONS)})")
        self._api, self._settings, self._tables = api, settings, tables
        self._api_version, self._root = f"{GROUP}/{version}", f"/apis/{GROUP}/{version}"
        self._workloads: dict[str, Object] = {}
        """The last known state of each Workload, by its uid."""
        self._since: dict[str, tuple[tuple[str, ...], float]] = {}
        """For each Workload that waits, its nominated clusters, and since when it has had them."""
        self._said: dict[str, str] = {}
        """The last reason that was logged for each Workload."""
        self._lock = threading.Lock()
        self._news, self._is_listed = threading.Event(), threading.Event()
        self._watch = ObjectWatch("kueue", api, f"{self._root}/workloads", "", self._listed, self._changed)

    def run(self, stop: threading.Event, *, once: bool = False) -> None:
        """Makes a round at each change and after each interval, until `stop` is set; with `once`, a single round."""
        self._watch.start()
        while not self._is_listed.wait(_PAUSE_S) and not stop.is_set():
            pass
        while not stop.is_set():
            self._news.clear()
            try:
                self.round()
            except (ApiRefused, ProviderUnavailable) as error:
                _log.warning("round: %s", error)
            if once:
                break
            self._news.wait(self._settings().interval_s)
            stop.wait(_PAUSE_S)
        self._watch.close()

    def round(self) -> int:
        """Nominates clusters for all Workloads that wait; returns how many were written.

        Raises:
            ApiRefused: the resources of MultiKueue cannot be listed.
            ProviderUnavailable: the API server does not answer.
        """
        settings, known = self._settings(), self._checks()
        with self._lock:
            workloads = dict(self._workloads)
        asking = {uid: one for uid, found in workloads.items() if (one := self._read(uid, found, known, settings))}
        self._forget(asking)
        nominations = nominate(settings.workers(), asking.values(), self._tables())
        written = 0
        for uid, one in asking.items():
            if one.admitted is not None:
                continue
            nomination = nominations[one.id]
            self._say(uid, one.id, nomination.why)
            if nomination.clusters != one.nominated:
                written += self._write(uid, workloads[uid], nomination.clusters)
        return written

    def _checks(self) -> dict[str, set[str]]:
        kinds = ("admissionchecks", "multikueueconfigs", "multikueueclusters")
        checks, configs, clusters = (self._api.objects(f"{self._root}/{kind}")[0] for kind in kinds)
        return clusters_of(checks, configs, clusters)

    def _read(
        self, uid: str, found: Object, known: Mapping[str, set[str]], settings: DispatcherSettings
    ) -> KueueWorkload | None:
        """Returns a Workload that waits for a cluster or runs in one; None: it concerns no dispatcher."""
        metadata, status = found["metadata"], found.get("status", {})
        check = check_of(found, known)
        if check is None or holds(found, "Finished") or not holds(found, "QuotaReserved"):
            return None
        admitted = status.get("clusterName")
        if admitted is None and (
            check.get("state") != "Pending" or holds(found, "Evicted") or "deletionTimestamp" in metadata
        ):
            return None
        name = f"{metadata['namespace']}/{metadata['name']}"
        try:
            jobs = jobs_of(found, settings.machine_types)
        except UnusableWorkload as error:
            self._say(uid, name, str(error))
            return None
        nominated = tuple(status.get("nominatedClusterNames") or ())
        waited_s = 0.0 if admitted is not None else self._waited_s(uid, nominated)
        return KueueWorkload(
            name,
            int(found["spec"].get("priority") or 0),
            seconds(metadata["creationTimestamp"]) or 0.0,
            jobs,
            frozenset(known[check["name"]]),
            tables_of(found),
            nominated,
            admitted,
            is_overdue=bool(nominated) and waited_s >= settings.next_cluster_s,
            is_patient=not nominated and waited_s >= settings.patience_s,
        )

    def _waited_s(self, uid: str, nominated: tuple[str, ...]) -> float:
        """Returns how long a Workload has had these nominations. A restart of the dispatcher starts it anew."""
        now_s = time.monotonic()
        before = self._since.get(uid)
        if before is None or before[0] != nominated:
            before = self._since[uid] = nominated, now_s
        return now_s - before[1]

    def _forget(self, asking: Mapping[str, KueueWorkload]) -> None:
        with self._lock:
            there = set(self._workloads)
        self._since = {uid: since for uid, since in self._since.items() if uid in asking}
        self._said = {uid: words for uid, words in self._said.items() if uid in there}

    def _say(self, uid: str, name: str, why: str | None) -> None:
        if why is not None and self._said.get(uid) != why:
            _log.info("%s is not nominated: %s", name, why)
        if why is None:
            self._said.pop(uid, None)
        else:
            self._said[uid] = why

    def _write(self, uid: str, found: Object, clusters: tuple[str, ...]) -> bool:
        """Applies the nominations of a Workload, unless it has changed; returns whether they were applied.

        All other fields that Kueue applied under the same name are repeated, since they would be removed otherwise. If
        the answer is lost, a later round finds what was written.
        """
        metadata = found["metadata"]
        path = f"{self._root}/namespaces/{metadata['namespace']}/workloads/{metadata['name']}"
        status = owned(found, MANAGER, "status")
        status.pop("nominatedClusterNames", None)
        if clusters:
            status["nominatedClusterNames"] = list(clusters)
        body = {
            "apiVersion": self._api_version,
            "kind": "Workload",
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
            "status": status,
        }
        query = {"fieldManager": MANAGER, "force": "true"}
        try:
            after = self._api.call("PATCH", f"{path}/status", query, body, applies=True)
        except ProviderUnavailable as error:
            _log.warning("%s: %s", path, error)
            return False
        except ApiRefused as refused:
            self._refused(uid, path, refused)
            return False
        _log.info(
            "%s/%s is nominated for %s", metadata["namespace"], metadata["name"], ", ".join(clusters) or "nothing"
        )
        self._put(uid, after)
        return True

    def _refused(self, uid: str, path: str, refused: ApiRefused) -> None:
        if refused.status not in (404, 409):
            _log.warning("%s: %s", path, refused.words)
            return
        try:
            self._put(uid, self._api.call("GET", path))  # It has changed: the next round decides on its new state.
            self._news.set()
        except ApiRefused:
            self._changed("DELETED", {"metadata": {"uid": uid}})
        except ProviderUnavailable as error:
            _log.warning("%s: %s", path, error)

    def _put(self, uid: str, found: Object) -> None:
        with self._lock:
            if uid in self._workloads and found["metadata"]["uid"] == uid:
                self._workloads[uid] = found

    def _listed(self, found: list[Object]) -> None:
        with self._lock:
            self._workloads = {one["metadata"]["uid"]: one for one in found}
        self._is_listed.set()
        self._news.set()

    def _changed(self, kind: str, found: dict[str, Any]) -> None:
        uid = found["metadata"]["uid"]
        with self._lock:
            if kind == "DELETED":
                self._workloads.pop(uid, None)
            else:
                self._workloads[uid] = found
        self._news.set()
