"""How a workload serves requests: its port, its readiness probe and its drain. Task 0 of the first job serves."""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from domain.references import filled_in

LOAD_HEADER = "Mizzen-Load"
"""The header of the probe's response in which a replica reports its load, a number of any unit, for the autoscaler."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProbeSpec(_Frozen):
    """The readiness probe: an HTTP request that the agent sends to the task. A status of 2xx or 3xx means ready."""

    path: str = "/"
    """Path and query of the request; begins with `/`."""
    body: str | None = None
    """None: GET. Otherwise POST with this body."""
    headers: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """The variables of the job's secrets to which `headers` refer, as `$NAME` or `${NAME}`."""
    initial_delay_s: float = 1200.0
    """Time from the start of the task within which it must become ready. A task that is not ready by then has
    failed."""
    timeout_s: float = 15.0
    """A response that takes longer counts as a failed probe."""
    interval_s: float = 5.0
    """Time between two probes of a task that is ready. A task that is not ready is probed more often."""
    failures: int = 3
    """Number of failed probes in a row after which a ready task is no longer ready."""

    def with_secrets(self, values: Mapping[str, str]) -> Self:
        """Returns the probe with the values of its secrets in the headers. `values` has the job's secrets."""
        known = {name: values[name] for name in self.secrets if name in values}
        return self.model_copy(update={"headers": filled_in(self.headers, known)})


_STOP_S = 5.0
"""The part of a notice that is kept for the stop of a replica; at most half of the notice."""


class ServingSpec(_Frozen):
    """How a workload serves requests."""

    port: int | None = None
    """The port on which the task listens. None: the agent chooses a port, and the task reads it from `MIZZEN_PORT`."""
    probe: ProbeSpec = ProbeSpec()
    drain_s: float = 30.0
    """How long requests that are in progress may continue after the replica gets no new ones, before it is stopped."""

    def stop_at_s(self, told_at_s: float, ends_at_s: float | None) -> float:
        """Returns when the agent of a machine that is reclaimed stops a replica that has not been stopped before.

        Until then its requests in progress continue. Usually its workload is stopped earlier, after `drain_s`.

        Args:
            told_at_s: the time of the notice, in seconds since the epoch.
            ends_at_s: the end of the machine; None: unknown.
        """
        if ends_at_s is None:
            return told_at_s + self.drain_s
        return ends_at_s - min(_STOP_S, max(0.0, ends_at_s - told_at_s) / 2)
