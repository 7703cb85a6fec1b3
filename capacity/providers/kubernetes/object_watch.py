"""Watches the objects of a resource: one list, then events, for as long as the API server can continue the watch."""

import logging
import threading
import time
from collections.abc import Callable

from capacity.provider import ProviderUnavailable
from capacity.providers.kubernetes.api import ApiRefused, KubernetesApi, Object

_WATCH_S = 240
"""The length of one watch. The next one continues from the last event or bookmark."""
_TRIED_S = 5
"""The length of the first watch after one that was refused: its end shows that watches are allowed again."""
_STANDING = 5
"""After so many refusals in a row a watch is replaced by lists. A server that has just started refuses everything for
some seconds, until it has read the roles."""
_LASTING_S = 1.0
"""A watch that ends sooner, without an event, is followed by a pause."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_log = logging.getLogger(__name__)


class ObjectWatch:
    """A thread that reports all objects of a resource, and then each change of one."""

    def __init__(
        self,
        name: str,
        api: KubernetesApi,
        resource: str,
        labels: str,
        listed: Callable[[list[Object]], None],
        changed: Callable[[str, Object], None],
    ) -> None:
        """`resource`: as for `KubernetesApi.path`. `changed` gets the type of the event and the object."""
        self._name, self._api, self._resource, self._labels = name, api, resource, labels
        self._listed, self._changed = listed, changed
        self._version = ""
        """The resource version from which the watch continues; empty: it starts with a list."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.refused = ""
        """Why the API server does not allow the watch; empty: it does, as far as is known."""

    def start(self) -> None:
        """Starts the watch, if it has not started."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                name = f"{self._resource} of {self._name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stops the watch at its next event."""
        self._closed.set()

    def _run(self) -> None:
        """Lists once, then continues the watch from its last event or bookmark; lists again only if that is too old.

        While the watch is refused, it lists again and again instead, with pauses.
        """
        pause_s, refusals, what = _PAUSE_S, 0, f"{self._name}: the watch of {self._resource}"
        while not self._closed.is_set():
            began_s, began_at, interrupted = time.monotonic(), self._version, True
            try:
                if not self._version:
                    found, version = self._api.objects(self._resource, labels=self._labels)
                    self._listed(found)
                    self._version = version
                self._follow()
                self.refused, refusals, interrupted = "", 0, False
            except ApiRefused as refused:
                if refused.status == 410:
                    self._version = ""
                    _log.info("%s expired; listing again", what)
                else:
                    refusals += 1
                    _log.warning("%s is refused: %s", what, refused)
                    if self.refused or refusals >= _STANDING:
                        self._version, self.refused = "", str(refused)
            except ProviderUnavailable as error:
                refusals = 0
                _log.info("%s was interrupted: %s", what, error)
            except Exception:  # One event must not end the watch for ever.
                self._version = ""
                _log.exception("%s: an event", what)
            lasted = time.monotonic() > began_s + _LASTING_S or self._version not in ("", began_at)
            if lasted and not self.refused:
                pause_s = _PAUSE_S
                if not interrupted:
                    continue
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _follow(self) -> None:
        """Follows one watch until the server ends it."""
        for_s = _TRIED_S if self.refused else _WATCH_S
        for kind, found in self._api.watch(self._resource, self._version, self._labels, for_s):
            if kind != "BOOKMARK":
                self._changed(kind, found)
            self._version = found["metadata"]["resourceVersion"]
            if self._closed.is_set():
                return
