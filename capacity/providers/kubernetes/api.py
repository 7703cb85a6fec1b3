"""Requests to the API server of a cluster, and their errors: refused, or unknown."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import yaml
from lightkube.config.client_adapter import Client, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ConfigError

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.settings import ClusterAccess

_PAGE = 500
_INVALID = (KeyError, TypeError, AttributeError, AssertionError, ValueError, yaml.YAMLError)
"""Errors of lightkube about a file that is no kubeconfig."""
Object = dict[str, Any]


class ApiRefused(Exception):
    """The API server refused a request: it had no effect."""

    def __init__(self, status: int, reason: str, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.reason = reason
        """Kubernetes' reason, such as `AlreadyExists`."""
        self.words = words


class KubernetesApi:
    """The resources of one namespace, and others by their paths. Several threads may use it.

    Objects are plain JSON: a library's models would drop fields of templates that are newer than the models.
    """

    def __init__(self, name: str, settings: ClusterAccess, namespace: str = "") -> None:
        self._name, self._settings, self._namespace = name, settings, namespace
        self._http: httpx2.Client | None = None
        self._borrowers = Counter[httpx2.Client]()
        """The number of threads that use each client."""
        self._is_closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes the connections as soon as no other thread uses them. Later requests raise ProviderUnavailable."""
        with self._lock:
            self._is_closed = True
            self._retire()

    def objects(self, resource: str, *, labels: str = "", fields: str = "") -> tuple[list[Object], str]:
        """Returns the objects as of now, and the resource version of the list.

        Raises:
            ApiRefused: it is not allowed.
            ProviderUnavailable: the API server does not answer.
        """
        given = {"limit": str(_PAGE), **_selectors(labels, fields)}
        while True:
            try:
                return self._pages(resource, given)
            except ApiRefused as refused:
                if refused.status != 410:
                    raise  # A later page was too old: list again, in one piece.
                given.pop("limit", None)

    def _pages(self, resource: str, given: Mapping[str, str]) -> tuple[list[Object], str]:
        found: list[Object] = []
        more = ""
        while True:
            page = self.call("GET", self.path(resource), {**given, **({"continue": more} if more else {})})
            found += page["items"]
            more = page["metadata"].get("continue", "")
            if not more:
                return found, page["metadata"]["resourceVersion"]

    def watch(self, resource: str, version: str, labels: str, timeout_s: int) -> Iterator[tuple[str, Object]]:
        """Yields type and object of each event after a resource version, with bookmarks, until the server ends it.

        Raises:
            ApiRefused: among others, with the status 410: the version is too old.
            ProviderUnavailable: the connection was lost.
        """
        given = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(timeout_s)}
        given |= {"resourceVersion": version, **_selectors(labels, "")}
        patience = httpx2.Timeout(self._settings.timeout_s, read=timeout_s + self._settings.timeout_s)
        with (
            self._asking(f"watching {resource}"),
            self._borrowed() as client,
            client.stream("GET", self.path(resource), params=given, timeout=patience) as answer,
        ):
            if answer.status_code >= 400:
                answer.read()
                raise self._error(answer)
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiRefused(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                yield event["type"], event["object"]

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        *,
        applies: bool = False,
    ) -> Object:
        """Sends a request; returns the object in the answer.

        The body of PATCH is a merge patch, or with `applies` the fields of a server-side apply.

        Raises:
            ApiRefused: it had no effect.
            ProviderUnavailable: it may have had an effect.
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        kind = "application/apply-patch+yaml" if applies else kind  # JSON is YAML.
        content = None if body is None else json.dumps(body)
        with self._asking(f"{method} {path}"):
            with self._borrowed() as client:
                answer = client.request(
                    method, path, params=dict(query or {}), content=content, headers={"content-type": kind}
                )
            if answer.status_code >= 400:
                raise self._error(answer)
            found: Object = answer.json()
            return found

    def path(self, resource: str, name: str = "") -> str:
        """Returns the path of a resource, or of one object of it.

        `resource` is a resource of v1, which is in every cluster, such as `pods`, or a path that begins with a slash.
        """
        root = resource if resource.startswith("/") else f"/api/v1/namespaces/{self._namespace}/{resource}"
        return root + (f"/{name}" if name else "")

    def version_of(self, group: str, known: Sequence[str]) -> str | None:
        """Returns the first of the known versions of a group of resources that the cluster has; None: it has none.

        Raises:
            ProviderUnavailable: the API server does not answer.
        """
        try:
            groups = self.call("GET", "/apis")["groups"]
        except ApiRefused as refused:
            raise ProviderUnavailable(f"{self._name}: API groups: {refused.status}: {refused.words}") from None
        served = {one["version"] for found in groups if found["name"] == group for one in found["versions"]}
        return next((version for version in known if version in served), None)

    @contextmanager
    def _borrowed(self) -> Iterator[httpx2.Client]:
        with self._lock:
            if self._is_closed:
                raise ProviderUnavailable(f"{self._name}: it was closed")
            if self._http is None:
                self._http = self._new_client()
            client = self._http
            self._borrowers[client] += 1
        try:
            yield client
        finally:
            with self._lock:
                self._borrowers[client] -= 1
                self._close_unused()

    def _retire(self) -> None:
        """Lets the next request use another client. The lock is held."""
        self._http = None
        self._close_unused()

    def _close_unused(self) -> None:
        """Closes retired clients that no thread uses: closing one while another thread reads would mix up sockets."""
        for client in [one for one, number in self._borrowers.items() if not number and one is not self._http]:
            del self._borrowers[client]
            client.close()

    def _new_client(self) -> httpx2.Client:
        path = self._settings.kubeconfig
        try:
            config = KubeConfig.from_env() if path is None else KubeConfig.from_file(path)
            chosen = config.get(self._settings.context)
            if chosen is None:
                raise ConfigError("it has no current context; set `context`")
            return Client(chosen, ConnectionParams(timeout=httpx2.Timeout(self._settings.timeout_s)))
        except (ConfigError, OSError) as error:
            raise ProviderUnavailable(f"{self._name}: kubeconfig: {error}") from None
        except _INVALID as error:
            said = " ".join(repr(error).split())
            raise ProviderUnavailable(f"{self._name}: kubeconfig: {path or 'the file'} is not valid: {said}") from None

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (httpx2.HTTPError, ConfigError, OSError, json.JSONDecodeError) as error:
            raise ProviderUnavailable(f"{self._name}: {what}: {error or type(error).__name__}") from None

    def _error(self, answer: httpx2.Response) -> Exception:
        """Returns the error of an answer. Credentials may be renewed, and an overloaded server recovers.

        An answer other than a `Status` is from a proxy in between, not from the API server, and says nothing about the
        request.
        """
        status = answer.status_code
        if status == 401:
            with self._lock:
                self._retire()  # The next request reads the credentials again.
        try:
            said = answer.json()
            is_status = said["kind"] == "Status"
            reason, words = str(said.get("reason", "")), str(said.get("message", ""))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
            is_status, reason, words = False, "", answer.text[:500]
        if not is_status or status in (401, 408, 429) or status >= 500:
            return ProviderUnavailable(f"{self._name}: {status}: {words}")
        return ApiRefused(status, reason, words)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    given = {"labelSelector": labels, "fieldSelector": fields}
    return {key: value for key, value in given.items() if value}
