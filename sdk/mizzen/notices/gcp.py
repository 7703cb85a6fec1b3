"""GCP: preemption from the metadata server, and the 24 hour limit of preemptible (not Spot) machines."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping

from mizzen.notices.metadata import LINK_LOCAL, TIMEOUT_S, Answer, Metadata, MetadataError
from mizzen.notices.notice import DEFAULT_LEAD_S, Kind, Notice, Watcher, Window

WINDOW_S = 30.0
PERIOD_S = 1.0
AGE_LIMIT_S = 24 * 3600.0
_ASK_AGAIN_S = 60.0
"""Seconds between requests whether the machine is preemptible, until one succeeds."""

_INSTANCE = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}


def base_of(environ: Mapping[str, str]) -> str:
    """Return the metadata address: `MIZZEN_GCP_METADATA`, Google's `GCE_METADATA_HOST`, or the link-local address."""
    if host := environ.get("GCE_METADATA_HOST"):
        host = f"http://{host}"
    return environ.get("MIZZEN_GCP_METADATA") or host or LINK_LOCAL


def boot_s() -> float:
    """Return the kernel's boot time, in seconds since the epoch. A reboot does not reset the platform's own limit."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class GcpWatcher(Watcher):
    """Watcher of a Spot or preemptible machine. At preemption the guest shuts down, which also sends SIGTERM."""

    platform = "gcp"

    def __init__(
        self,
        base: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        lead_s: float = DEFAULT_LEAD_S,
        started_at_s: Callable[[], float] = boot_s,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the watcher without sending a request.

        Args:
            base: address of the metadata server; from the environment by default.
            environ: variables to read; `os.environ` by default.
            timeout_s: timeout of each request, in seconds.
            lead_s: how long before the 24 hour limit the notice is given, in seconds.
            started_at_s: returns the start time of the machine, in seconds since the epoch.
            clock: returns seconds since the epoch.
            monotonic: returns seconds of a monotonic clock.

        Raises:
            ValueError: the address or `MIZZEN_NOTICE_WINDOW_S` is invalid.
        """
        environ = os.environ if environ is None else environ
        super().__init__(
            Window.told(environ, WINDOW_S, "GCP's default time from preemption to the machine's end"),
            period_s=PERIOD_S,
            lead_s=lead_s,
            clock=clock,
        )
        self._metadata = Metadata(base or base_of(environ), timeout_s)
        self._started_at_s = started_at_s
        self._monotonic = monotonic
        self._ask_at_s = -math.inf
        self._limited: bool | None = None

    def answers(self) -> bool:
        """Return whether the server is Google's: it sends Google's header and a numeric instance id.

        Raises:
            MetadataError: the server does not respond, or belongs to another platform.
        """
        answer = self._get("id")
        return answer.status == 200 and answer.text.isdecimal()

    def poll(self) -> Notice | None:
        """Return the preemption if it has started, else the age limit if it is near, else None."""
        answer = self._get("preempted")
        if answer.status != 200 or answer.text.upper() not in ("TRUE", "FALSE"):
            raise self._metadata.unexpected(f"{_INSTANCE}preempted", answer)
        if answer.text.upper() == "TRUE":
            return self._notice(Kind.PREEMPT, "instance/preempted is TRUE")
        if self._limited is None and self._monotonic() >= self._ask_at_s:
            self._ask_at_s = self._monotonic() + _ASK_AGAIN_S
            # A failed request for the age limit must not delay the next poll for preemption.
            with contextlib.suppress(MetadataError):
                self._limited = self._is_limited()
                self.ends_at_s = self._started_at_s() + AGE_LIMIT_S if self._limited else None
        # A machine older than the limit is exempt from it. Without this check every restart on it would exit at once.
        if self.ends_at_s is not None and self.ends_at_s - self.lead_s <= self._clock() < self.ends_at_s:
            return self._notice(Kind.AGE_LIMIT, "scheduling/preemptible is TRUE: 24 hours at most", self.ends_at_s)
        return None

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a signal: the guest shuts down, presumably for preemption, within GCP's window."""
        return self._notice(Kind.STOP, signal.Signals(received).name)

    def _is_limited(self) -> bool:
        """Return whether the 24 hour limit applies. Spot machines also report `preemptible`, but have no limit."""
        preemptible, model = self._get("scheduling/preemptible"), self._get("scheduling/provisioning-model")
        for answer, path in ((preemptible, "preemptible"), (model, "provisioning-model")):
            if answer.status not in (200, 404):
                raise self._metadata.unexpected(f"{_INSTANCE}scheduling/{path}", answer)
        spot = model.status == 200 and model.text.upper() == "SPOT"
        return preemptible.status == 200 and preemptible.text.upper() == "TRUE" and not spot

    def _get(self, path: str) -> Answer:
        answer = self._metadata.request("GET", f"{_INSTANCE}{path}", _FLAVOR)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataError(f"{self._metadata.base}{_INSTANCE}{path}: status {answer.status}, not from Google")
        return answer
