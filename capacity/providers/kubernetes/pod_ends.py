"""Stores how pods ended: a deleted pod is in no list any more, so its last state comes from a watch."""

import logging
import threading
import time
from collections import OrderedDict
from typing import Any

from capacity.provider import FoundMachine, ProviderUnavailable
from capacity.providers.kubernetes.api import ApiRefused, KubernetesApi
from capacity.providers.kubernetes.object_watch import ObjectWatch
from capacity.providers.kubernetes.pod import ENDED, INSTANCE, native_id
from capacity.providers.kubernetes.status import BY_MIZZEN, disruption, explained, seconds, why_ended

_MOST_ENDS, _KEPT_S = 10_000, 3600.0
_AGAIN_S = 10.0
"""Events that explain a deletion may arrive late: they are read again after this time."""
_SILENT_S = 60.0
"""Clusters may keep events in a store of their own. If they cannot be read, no pod's are read again for this time."""
_DELETED = "Deleted: the pod was deleted or evicted"
_log = logging.getLogger(__name__)


class PodEnds:
    """The pods of one provider that ended within the last hour. A thread watches them from `start` on."""

    def __init__(self, name: str, api: KubernetesApi, labels: str) -> None:
        self._name, self._api = name, api
        self._ends: OrderedDict[str, tuple[float, FoundMachine]] = OrderedDict()
        self._last: dict[str, dict[str, Any]] = {}
        """The last state of each pod that is there, by its id."""
        self._taken: set[str] = set()
        """Ids of pods whose deletion began while they ran."""
        self._words: OrderedDict[str, tuple[float, str | None]] = OrderedDict()
        """When the events about a pod were read, and how they explain its deletion, by its uid."""
        self._silent_until_s, self._silent_because = 0.0, ""
        self._lock = threading.Lock()
        self._watch = ObjectWatch(name, api, "pods", labels, self._relisted, self._changed)
        self.start, self.close = self._watch.start, self._watch.close

    @property
    def refused(self) -> str:
        """What the API server does not allow: to watch pods, or to read events; empty: neither is known."""
        if self._watch.refused:
            return f"watching pods is refused: {self._watch.refused}"
        return self._silent_because if time.monotonic() < self._silent_until_s else ""

    def recent(self) -> list[FoundMachine]:
        """Returns the machines whose pods are gone."""
        with self._lock:
            old_s = time.monotonic() - _KEPT_S
            while len(self._ends) > _MOST_ENDS or (self._ends and next(iter(self._ends.values()))[0] < old_s):
                self._ends.popitem(last=False)
            return [found for _, found in self._ends.values()]

    def of(self, instance: str) -> str | None:
        """Returns the id of an ended pod of an instance; None: none has ended."""
        with self._lock:
            return next((key for key, (_, found) in self._ends.items() if found.instance == instance), None)

    def add(self, native_id: str, instance: str, launched_at_s: float, words: str) -> None:
        """Records the end of a pod, unless its end is known."""
        with self._lock:
            found = FoundMachine(native_id, instance, launched_at_s, ended=words)
            self._ends.setdefault(native_id, (time.monotonic(), found))

    def why_deleted(self, pod: dict[str, Any]) -> str:
        """Returns why a pod is being deleted: from its conditions, or before 1.26 from events, which may come later."""
        if ENDED in pod["metadata"]["labels"]:
            return BY_MIZZEN
        if (target := disruption(pod)) is not None:
            return target
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        with self._lock:
            asked_s, words = self._words.get(uid, (-_AGAIN_S, None))
            asks_from_s = max(asked_s + _AGAIN_S, self._silent_until_s)
        if words is not None or time.monotonic() < asks_from_s:
            return words or _DELETED
        try:
            events, _ = self._api.objects("events", fields=f"involvedObject.kind=Pod,involvedObject.name={name}")
        except (ApiRefused, ProviderUnavailable) as error:
            _log.warning("%s: events of pod %s: %s", self._name, name, error)
            self._silent_because = f"events cannot be read: {error}"
            self._silent_until_s = time.monotonic() + _SILENT_S
            return _DELETED
        words = explained(pod, events)
        with self._lock:
            self._words[uid] = time.monotonic(), words
            if len(self._words) > _MOST_ENDS:
                self._words.popitem(last=False)
        return words or _DELETED

    def _relisted(self, pods: list[dict[str, Any]]) -> None:
        """Takes a list: pods that existed before the watch was interrupted, and do not exist now, have ended since."""
        there = {native_id(pod): pod for pod in pods}
        for gone in self._last.keys() - there.keys():
            self._gone(self._last[gone])
        self._last = {}
        for pod in pods:
            self._seen(pod)

    def _changed(self, kind: str, pod: dict[str, Any]) -> None:
        if kind == "DELETED":
            self._gone(pod)
            self._last.pop(native_id(pod), None)
        else:
            self._seen(pod)

    def _seen(self, pod: dict[str, Any]) -> None:
        self._last[native_id(pod)] = _of_interest(pod)
        if "deletionTimestamp" in pod["metadata"] and not _has_ended(pod):
            self._taken.add(native_id(pod))

    def _gone(self, pod: dict[str, Any]) -> None:
        """Records the end of a deleted pod. Its last state has the reason if it had ended before its deletion."""
        metadata = pod["metadata"]
        by_itself = _has_ended(pod) and native_id(pod) not in self._taken
        self._taken.discard(native_id(pod))
        words = why_ended(pod) if by_itself else self.why_deleted(pod)
        at_s = seconds(metadata["creationTimestamp"]) or 0.0
        self.add(native_id(pod), metadata["labels"].get(INSTANCE, ""), at_s, words)


def _of_interest(pod: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a pod that show how it ended."""
    kept = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")
    metadata = {key: value for key, value in pod["metadata"].items() if key in kept}
    return {"metadata": metadata, "spec": {"nodeName": pod["spec"].get("nodeName")}, "status": pod["status"]}


def _has_ended(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in ("Failed", "Succeeded")
