"""The provider for a Kubernetes cluster: one pod for each machine."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from capacity.offers import Offer
from capacity.provider import FoundMachine, LaunchRefused, LaunchRequest, ProviderUnavailable, Refusal
from capacity.providers.kubernetes.api import ApiRefused, KubernetesApi, Object
from capacity.providers.kubernetes.kueue import Queues
from capacity.providers.kubernetes.pod import ENDED, INSTALLATION, PROVIDER, native_id, pod_of, secret_of
from capacity.providers.kubernetes.pod_ends import PodEnds
from capacity.providers.kubernetes.settings import KubernetesSettings
from capacity.providers.kubernetes.status import BY_MIZZEN, machine_of
from capacity.providers.offered_zones import check_offered, offers_of
from domain.ids import is_name
from infra.config.settings import Settings
from infra.keys import installation_id

_UID = re.compile(r"[0-9A-Za-z-]{1,64}")
_END_S = 30
"""The grace period when mizzen ends a pod: its tasks have left, or it is lost."""


class KubernetesProvider:
    """Creates pods. The name of a pod is the id of its instance, and labels name the installation and the provider."""

    lists_late_s = 0.0
    """Lists are read from the store of the cluster, so they contain every pod."""
    queues = True

    def __init__(self, name: str, settings: KubernetesSettings, installation: str) -> None:
        self.name = name
        self._settings = settings
        self._api = KubernetesApi(name, settings, settings.namespace)
        self._labels = {INSTALLATION: installation, PROVIDER: name}
        self._selector = ",".join(f"{key}={value}" for key, value in self._labels.items())
        self._ends = PodEnds(name, self._api, self._selector)
        self._queues = Queues(name, self._api, settings.namespace)

    @property
    def impaired(self) -> str:
        """See `Provider.impaired`: reasons of ends come from watches and events, which roles may forbid."""
        return self._ends.refused

    def close(self) -> None:
        """Ends the watch of pods, and closes the connections."""
        self._ends.close()
        self._api.close()

    def offers(self) -> Sequence[Offer]:
        """See `Provider.offers`."""
        s = self._settings
        return offers_of(self.name, s.region, s.start_s, s.zones, s.machine_types)

    def launch(self, request: LaunchRequest) -> str:
        """See `Provider.launch`. The name of the pod is the client token: there is never a second pod of that name.

        The pod comes before its Secret, so that the cluster deletes the Secret with it. Its container starts when both
        exist.
        """
        check_offered(self.name, request, self._settings.zones, self._settings.machine_types)
        if (ended := self._ends.of(request.instance)) is not None:
            return ended  # The next round records how.
        self._ends.start()
        try:
            pod = self._create(request)
        except ApiRefused as refused:
            raise LaunchRefused(_refusal(refused), refused.words) from None
        try:
            self._api.call("POST", self._api.path("secrets"), body=secret_of(request, pod, self._labels))
        except ApiRefused as refused:
            if refused.reason != "AlreadyExists":
                self.terminate(native_id(pod))
                raise LaunchRefused(_refusal(refused), refused.words) from None
        return native_id(pod)

    def _create(self, request: LaunchRequest) -> Object:
        """Creates the pod of an instance, or finds it."""
        body = pod_of(self._settings, request, self._labels)
        try:
            return self._api.call("POST", self._api.path("pods"), body=body)
        except ApiRefused as refused:
            if refused.reason == "Conflict":  # Two requests have changed the usage of a quota.
                raise ProviderUnavailable(f"{self.name}: {refused.words}") from None
            if refused.reason != "AlreadyExists":
                raise
        try:
            pod = self._api.call("GET", self._api.path("pods", request.instance))
        except ApiRefused as refused:
            raise ProviderUnavailable(f"{self.name}: pod {request.instance}: {refused.words}") from None
        labels = pod["metadata"].get("labels", {})
        if {key: labels.get(key) for key in self._labels} != self._labels:
            raise LaunchRefused(Refusal.REQUEST, f"a pod {request.instance} of another owner exists")
        if ENDED in labels:
            raise LaunchRefused(Refusal.REQUEST, f"the pod {request.instance} is ending")
        return pod

    def describe(self) -> Sequence[FoundMachine]:
        """See `Provider.describe`. One list, plus the pods that a watch has seen end."""
        self._ends.start()
        try:
            pods, _ = self._api.objects("pods", labels=self._selector)
        except ApiRefused as refused:
            raise ProviderUnavailable(f"{self.name}: {refused.status}: {refused.words}") from None
        now_s = time.time()
        found, queued = [], self._queues.waits(pods)
        for pod in pods:
            why = self._ends.why_deleted(pod) if "deletionTimestamp" in pod["metadata"] else ""
            machine = machine_of(pod, now_s, self._settings.start_limit_s, why)
            words = queued.get(pod["metadata"]["uid"])
            found.append(machine if words is None else replace(machine, waits=words))
        there = {machine.native_id for machine in found}
        return [*found, *(one for one in self._ends.recent() if one.native_id not in there)]

    def terminate(self, native_id: str) -> None:
        """See `Provider.terminate`. The label tells every worker that mizzen itself ends the pod."""
        name, _, uid = native_id.partition(".")
        if not is_name(name) or _UID.fullmatch(uid) is None:
            return
        path = self._api.path("pods", name)
        mark = {"metadata": {"uid": uid, "labels": {ENDED: "true"}}}
        body = {"gracePeriodSeconds": min(_END_S, self._settings.grace_s), "preconditions": {"uid": uid}}
        try:
            self._api.call("PATCH", path, body=mark)
            self._api.call("DELETE", path, body=body)
        except ApiRefused as refused:
            if refused.status not in (404, 409):  # It is gone, or the name is that of a later pod.
                raise ProviderUnavailable(f"{self.name}: pod {name}: {refused.status}: {refused.words}") from None
            return
        self._ends.add(native_id, name, time.time(), BY_MIZZEN)


def _refusal(refused: ApiRefused) -> Refusal:
    return Refusal.QUOTA if "exceeded quota" in refused.words else Refusal.REQUEST


def open_provider(name: str, settings: KubernetesSettings, installation: Settings) -> KubernetesProvider:
    """Returns the provider, without calling the cluster.

    Raises:
        ConfigurationError: this machine has no master key. A label of the pods is derived from it.
    """
    return KubernetesProvider(name, settings, installation_id(installation.master_key_path))
