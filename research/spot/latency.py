"""The latency of requests that the replicas of a replayed window serve, by a queueing model.

A balancer has one queue, in the order of arrivals. A request starts on the ready replica with the fewest running
requests; among equal ones, on the one that has been ready longest. Each replica answers up to `concurrency` requests at
the same time, and its speed does not depend on their number. If all replicas are full, or none is ready, requests wait.

A preemption interrupts the running requests of the replica. They start again from the beginning, in the order of their
arrivals, as soon as another replica has room. A replica that the policy ends takes no new requests, and finishes those
that are running; that time is not billed. A request fails once `timeout_s` has passed since its arrival, whether it
waits or runs. The replicas that are ready at the end of the window stay until all requests have an end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from research.spot.queue_model import FAILED_RUNNING, FAILED_WAITING, serve
from research.spot.replay import ReplicaSpan
from research.spot.requests import Requests

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class ServingSettings:
    """The settings of the queueing model."""

    concurrency: int = 4
    """The number of requests that one replica answers at the same time; at least 1."""
    timeout_s: float = 100.0
    """The time in seconds from its arrival after which a request fails; above 0. The default is that of section 5.1."""


@dataclass(frozen=True)
class WindowLatency:
    """The measurements of the requests of one window. A failed request counts with the timeout as its latency.

    Without that rule, a policy that fails most requests would seem fast.
    """

    requests: int
    failed_waiting: int
    """The number of requests whose timeout ended in the queue."""
    failed_running: int
    """The number of requests whose timeout ended while a replica worked on them."""
    interrupted: int
    """The number of requests that were interrupted by a preemption at least once, answered later or not."""
    p50_s: float | None
    """The median of the latencies in seconds; None if the window has no requests."""
    p90_s: float | None
    p99_s: float | None

    @property
    def failed_share(self) -> float | None:
        """The share of requests that failed; None if the window has no requests."""
        return (self.failed_waiting + self.failed_running) / self.requests if self.requests else None

    def to_json(self) -> dict[str, Any]:
        """Returns the measurements as values of JSON."""
        return {**asdict(self), "failed_share": self.failed_share}


def measure_latency(
    requests: Requests, spans: Iterable[ReplicaSpan], length_s: float, settings: ServingSettings
) -> tuple[WindowLatency, tuple[float, ...]]:
    """Serves the requests of a window with its replicas.

    Args:
        requests: the requests.
        spans: the replicas of the window.
        length_s: the length of the window in seconds.
        settings: the limits of replicas and requests.

    Returns the measurements, and the times at which failed requests had arrived.
    """
    ready = sorted(
        (one.ready_s, one.number, np.inf if one.ended_s >= length_s else one.ended_s, one.preempted)
        for one in spans
        if one.ready_s is not None and one.ended_s > one.ready_s
    )
    from_s = np.array([one[0] for one in ready], dtype=np.float64)
    to_s = np.array([one[2] for one in ready], dtype=np.float64)
    preempted = np.array([one[3] for one in ready], dtype=np.bool_)
    latency_s, outcome, interrupted = serve(
        requests.arrival_s,
        requests.service_s,
        from_s,
        to_s,
        np.argsort(to_s, kind="stable"),
        preempted,
        settings.concurrency,
        settings.timeout_s,
    )
    percentiles = _percentiles(latency_s)
    result = WindowLatency(
        latency_s.size,
        int(np.count_nonzero(outcome == FAILED_WAITING)),
        int(np.count_nonzero(outcome == FAILED_RUNNING)),
        int(np.count_nonzero(interrupted)),
        *percentiles,
    )
    failed = (outcome == FAILED_WAITING) | (outcome == FAILED_RUNNING)
    return result, tuple(requests.arrival_s[failed].tolist())


def _percentiles(latency_s: npt.NDArray[np.float64]) -> Sequence[float | None]:
    if not latency_s.size:
        return [None] * len(PERCENTILES)
    found: list[float | None] = np.percentile(latency_s, PERCENTILES).tolist()
    return found
