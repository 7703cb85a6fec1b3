"""Azure: scheduled events of the instance metadata service, of type `Preempt`."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from mizzen.notices.metadata import TIMEOUT_S, CloudWatcher, epoch_s, json_object
from mizzen.notices.notice import Kind, Notice, Window

WINDOW_S = 30.0
PERIOD_S = 1.0
FIRST_TIMEOUT_S = 130.0
"""Azure enables scheduled events at a machine's first request, whose response can take two minutes."""

_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_COMPUTE = "/metadata/instance/compute?api-version=2021-02-01"
_HEADERS = {"Metadata": "true"}


class AzureWatcher(CloudWatcher):
    """Watcher of an Azure Spot machine. Events of other machines in its group are ignored."""

    platform = "azure"
    address_variables = ("MIZZEN_AZURE_METADATA",)

    def __init__(
        self,
        base: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        resource: str | None = None,
        acknowledges: bool = False,
        timeout_s: float = TIMEOUT_S,
        first_timeout_s: float = FIRST_TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the watcher without sending a request. Other arguments and errors: see `CloudWatcher`.

        `resource` is this machine's name in events; by default the name that the metadata server returns.
        `acknowledges` says whether `acknowledge` lets Azure stop the machine at once. Azure then does not wait for
        other processes on the machine, so leave it off if there are any. `first_timeout_s` is the timeout of requests
        for events until the first response.
        """
        window = Window(WINDOW_S, "Azure's minimum time before Preempt")
        super().__init__(window, base, environ, timeout_s=timeout_s, period_s=PERIOD_S, clock=clock)
        self._resource = resource
        self._acknowledges = acknowledges
        self._timeout_s = max(timeout_s, first_timeout_s)
        self._event: str | None = None

    def answers(self) -> bool:
        """Return whether the server is Azure's: it describes the machine in Azure's format."""
        return self._describe() is not None

    def poll(self) -> Notice | None:
        """Return this machine's earliest eviction; None if there is none."""
        resource = self._name()
        answer = self._metadata.request("GET", _EVENTS, _HEADERS, timeout_s=self._timeout_s)
        if answer.status != 200:
            raise self._metadata.unexpected(_EVENTS, answer)
        events = json_object(self._metadata, _EVENTS, answer).get("Events")
        if not isinstance(events, list):
            raise self._metadata.unexpected(_EVENTS, answer)
        self._timeout_s = self._metadata.timeout_s
        found: Notice | None = None
        for event in events:
            if not _is_eviction(event, resource):
                continue
            # Azure gives no time for an eviction that has started.
            ends_at_s = self._clock() if event.get("EventStatus") == "Started" else epoch_s(event.get("NotBefore"))
            notice = self._notice(Kind.PREEMPT, json.dumps(event), ends_at_s)
            if notice.supersedes(found):
                found, self._event = notice, str(event.get("EventId", ""))
        return found

    def acknowledge(self) -> None:
        """Approve the eviction, if the watcher was created with `acknowledges`: Azure may stop the machine now."""
        if not self._acknowledges or not self._event:
            return
        body = json.dumps({"StartRequests": [{"EventId": self._event}]}).encode()
        answer = self._metadata.request("POST", _EVENTS, {**_HEADERS, "Content-Type": "application/json"}, body)
        if answer.status not in (200, 202, 204):
            raise self._metadata.unexpected(_EVENTS, answer)

    def _name(self) -> str:
        if self._resource is None:
            described = self._describe()
            if described is None:
                raise self._metadata.unexpected(_COMPUTE, self._metadata.request("GET", _COMPUTE, _HEADERS))
            self._resource = described
        return self._resource

    def _describe(self) -> str | None:
        """Return the machine's name; None if the response is not in Azure's format."""
        answer = self._metadata.request("GET", _COMPUTE, _HEADERS)
        if answer.status != 200:
            raise self._metadata.unexpected(_COMPUTE, answer)
        compute = json_object(self._metadata, _COMPUTE, answer)
        parts = [compute.get(key) for key in ("name", "vmId", "azEnvironment")]
        return str(parts[0]) if all(isinstance(part, str) and part for part in parts) else None


def _is_eviction(event: Any, resource: str) -> bool:
    if not isinstance(event, dict) or event.get("EventType") != "Preempt":
        return False
    names = event.get("Resources")
    return isinstance(names, list) and resource.lower() in [str(name).lower() for name in names]
