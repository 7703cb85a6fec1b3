"""The gateway's metrics for Prometheus."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxies.gateway.connections import Connections
from proxies.gateway.keys import Sessions
from proxies.gateway.limits import MachineLimits

_PREFIX = "mizzen_gateway"


class GatewayMetrics(Collector):
    """Counts of calls, which `proxies.gateway.proxy` adds, and values that are read when Prometheus asks."""

    def __init__(self, sessions: Sessions, machines: MachineLimits) -> None:
        self._sessions, self._machines = sessions, machines
        self.connections: Connections | None = None
        """Set once the gateway listens."""
        self._counted = CollectorRegistry(auto_describe=False)
        self.calls = Counter(
            f"{_PREFIX}_calls", "Calls that ended, by method and status code of gRPC", ["method", "code"],
            registry=self._counted,
        )  # fmt: skip
        """Calls of methods that agents may not call, and calls without a valid key, have the method `other`."""
        self.temporal_s = Histogram(
            f"{_PREFIX}_temporal_seconds", "Time until Temporal answered a call, except polls", ["method"],
            registry=self._counted,
        )  # fmt: skip

    def collect(self) -> Iterable[Metric]:
        """Returns the current values."""
        yield from self._counted.collect()
        calls = GaugeMetricFamily(f"{_PREFIX}_calls_in_progress", "Calls in progress", labels=["kind"])
        polls, others = self._machines.in_progress()
        calls.add_metric(["poll"], polls)
        calls.add_metric(["other"], others)
        yield calls
        yield _gauge("keys", "Valid keys that were used within the last minute", self._sessions.in_use)
        yield _gauge(
            "keys_check_age_seconds",
            "Seconds since the keys in use were read from Postgres; revocations since then have no effect yet",
            self._sessions.check_age_s,
        )
        if self.connections is not None:
            yield _gauge("connections", "Open connections of agents", self.connections.open)
            yield _gauge("addresses", "Addresses with open connections", self.connections.addresses)
            ended = "Connections that were ended because their address had too many"
            yield CounterMetricFamily(f"{_PREFIX}_connections_ended", ended, self.connections.ended)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, value)
