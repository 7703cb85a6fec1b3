"""The client's part about services."""

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mizzen_client import views
from mizzen_client.calls import Calls
from mizzen_client.transport import Params

if TYPE_CHECKING:
    from mizzen_client.archives import PackedFolder


class Services(Calls):
    """The methods about services. A service is named by its id, or by its name."""

    def create_service(
        self,
        document: Mapping[str, Any],
        workdir: "Path | str | PackedFolder | None" = None,
        *,
        name: str | None = None,
    ) -> views.ServiceChanged:
        """Create a service from a service document. `name` is its name if the document has none.

        A call creates at most one service, even if its request is retried: an Idempotency-Key is always sent.
        """
        answer = self._make("POST", ("services",), document, workdir, params={"name": name})
        return cast(views.ServiceChanged, answer)

    def update_service(
        self,
        service: str,
        document: Mapping[str, Any],
        workdir: "Path | str | PackedFolder | None" = None,
        *,
        blue_green: bool = False,
    ) -> views.ServiceChanged:
        """Replace the document of a service; the replicas of the older version are replaced.

        `blue_green`: no replica of the new version gets requests before all of them are ready.
        """
        if workdir is not None and document.get("tenant") is None:  # The upload belongs to the service's tenant.
            document = {**document, "tenant": self.service(service)["tenant"]}
        params = {"mode": "blue_green" if blue_green else "rolling"}
        answer = self._make("PUT", ("services", service), document, workdir, params=params)
        return cast(views.ServiceChanged, answer)

    def _make(self, method: str, parts: tuple[str, ...], *document: Any, params: Params) -> Any:
        # Without a key, a retried request could create one more version.
        headers = {"idempotency-key": uuid.uuid4().hex}
        return self._send(method, parts, *document, params=params, headers=headers, idempotent=True)

    def services(self, tenant: str | None = None, *, ended: bool = False) -> list[views.Service]:
        """Return the services, optionally of one tenant. `ended` includes services that have ended."""
        return list(self._pages("services", {"tenant": tenant, "ended": ended or None}, None))

    def service(self, service: str) -> views.ServiceDetail:
        """Return a service with its replicas."""
        return cast(views.ServiceDetail, self._call("GET", "services", service))

    def service_replicas(self, service: str, limit: int | None = None) -> Iterator[views.ServiceReplica]:
        """Return all replicas of a service, newest first. Replicas that have ended are included."""
        return self._pages(("services", service, "replicas"), {}, limit)

    def service_replica(self, service: str, number: int) -> views.ServiceReplica | None:
        """Return a replica of a service by its number, or None if there is none. It may have ended."""
        params = {"limit": 1, "cursor": number + 1}  # A page has the replicas below its cursor, the newest first.
        found = self._call("GET", "services", service, "replicas", params=params)["items"]
        return cast(views.ServiceReplica, found[0]) if found and found[0]["number"] == number else None

    def endpoints(self, service: str) -> views.EndpointList:
        """Return the replicas that serve a service's requests, and the balancing policy."""
        return cast(views.EndpointList, self._call("GET", "services", service, "endpoints"))

    def end_service(self, service: str) -> views.ServiceDetail:
        """End a service with all its replicas and their machines."""
        return cast(views.ServiceDetail, self._call("DELETE", "services", service, body={}, idempotent=True))
