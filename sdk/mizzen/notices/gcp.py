"""GCP: preemption from the metadata server, and the 24 hour limit of preemptible (not Spot) machines."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping

from mizzen.notices.metadata import TIMEOUT_S, Answer, CloudWatcher, MetadataError
from mizzen.notices.notice import DEFAULT_LEAD_S, Kind, Notice, Window

WINDOW_S = 30.0
PERIOD_S = 1.0
AGE_LIMIT_S = 24 * 3600.0
_ASK_AGAIN_S = 60.0
"""Seconds between requests whether the machine is preemptible, until one succeeds."""

_INSTANCE = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}


def boot_s() -> float:
    """Return the kernel's boot time, in seconds since the epoch. A reboot does not reset the platform's own limit."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class GcpWatcher(CloudWatcher):
    """Watcher of a Spot or preemptible machine. At preemption the guest shuts down, which also sends SIGTERM."""

    platform = "gcp"
    address_variables = ("MIZZEN_GCP_METADATA", "GCE_METADATA_HOST")

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
        """Create the watcher without sending a request. Other arguments and errors: see `CloudWatcher`.

        The notice is given `lead_s` seconds before the 24 hour limit. `started_at_s` returns the start time of the
        machine, in seconds since the epoch, and `monotonic` the seconds of a monotonic clock.
        """
        environ = os.environ if environ is None else environ
        window = Window(WINDOW_S, "GCP's default time from preemption to the machine's end").or_told(environ)
        super().__init__(window, base, environ, timeout_s=timeout_s, period_s=PERIOD_S, clock=clock, lead_s=lead_s)
        self._of_signal = window  # The guest shuts down, presumably for preemption.
        self._started_at_s = started_at_s
        self._monotonic = monotonic
        self._ask_at_s = -math.inf
        self._limited: bool | None = None

    def answers(self) -> bool:
        """Return whether the server is Google's: it sends Google's header and a numeric instance id."""
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
