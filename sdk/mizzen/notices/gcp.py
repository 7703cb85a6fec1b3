"""GCP: the metadata server's word of preemption, and the 24 hours that a preemptible (not Spot) machine lives."""

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
"""Whether the machine is preemptible is asked again so long after an answer that says nothing."""

_INSTANCE = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}


def base_of(environ: Mapping[str, str]) -> str:
    """`MIZZEN_GCP_METADATA`, the host in Google's own `GCE_METADATA_HOST`, or the link-local address."""
    if host := environ.get("GCE_METADATA_HOST"):
        host = f"http://{host}"
    return environ.get("MIZZEN_GCP_METADATA") or host or LINK_LOCAL


def boot_s() -> float:
    """When the kernel started, in seconds since the epoch. The platform's own count goes on over a reboot."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class GcpWatcher(Watcher):
    """Preemption of a Spot or preemptible machine. SIGTERM comes with it, from the shutdown of the guest."""

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
        """Nothing is asked yet.

        Args:
            base: address of the metadata server; from the environment by default.
            environ: variables to read; `os.environ` by default.
            timeout_s: for each request.
            lead_s: how long before it the 24 hours' end is told.
            started_at_s: gives the start of the machine, in seconds since the epoch.
            clock: seconds since the epoch.
            monotonic: seconds of a clock that is never set.

        Raises:
            ValueError: the address, or `MIZZEN_NOTICE_WINDOW_S`, is not in its form.
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
        """Whether the server at the address is Google's: it says so, and names an instance by a number.

        Raises:
            MetadataError: it does not answer, or is another's.
        """
        answer = self._get("id")
        return answer.status == 200 and answer.text.isdecimal()

    def poll(self) -> Notice | None:
        """Preemption if it has begun, else the age limit if it is near."""
        answer = self._get("preempted")
        if answer.status != 200 or answer.text.upper() not in ("TRUE", "FALSE"):
            raise self._metadata.unexpected(f"{_INSTANCE}preempted", answer)
        if answer.text.upper() == "TRUE":
            return self._notice(Kind.PREEMPT, "instance/preempted is TRUE")
        if self._limited is None and self._monotonic() >= self._ask_at_s:
            self._ask_at_s = self._monotonic() + _ASK_AGAIN_S
            # What is not known of the age limit must not delay the next look at the preemption.
            with contextlib.suppress(MetadataError):
                self._limited = self._is_limited()
                self.ends_at_s = self._started_at_s() + AGE_LIMIT_S if self._limited else None
        # One that is older lives by other rules than these. It is not told, or every restart on it would end at once.
        if self.ends_at_s is not None and self.ends_at_s - self.lead_s <= self._clock() < self.ends_at_s:
            return self._notice(Kind.AGE_LIMIT, "scheduling/preemptible is TRUE: 24 hours at most", self.ends_at_s)
        return None

    def on_signal(self, received: int) -> Notice:
        """The guest is being shut down, by preemption for what is known; the window is the platform's."""
        return self._notice(Kind.STOP, signal.Signals(received).name)

    def _is_limited(self) -> bool:
        """Whether the machine is preemptible in the old way: Spot machines say that they are preemptible too."""
        preemptible, model = self._get("scheduling/preemptible"), self._get("scheduling/provisioning-model")
        for answer, path in ((preemptible, "preemptible"), (model, "provisioning-model")):
            if answer.status not in (200, 404):
                raise self._metadata.unexpected(f"{_INSTANCE}scheduling/{path}", answer)
        spot = model.status == 200 and model.text.upper() == "SPOT"
        return preemptible.status == 200 and preemptible.text.upper() == "TRUE" and not spot

    def _get(self, path: str) -> Answer:
        answer = self._metadata.request("GET", f"{_INSTANCE}{path}", _FLAVOR)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataError(f"{self._metadata.base}{_INSTANCE}{path}: no answer of Google's, {answer.status}")
        return answer
