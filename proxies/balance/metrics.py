"""The balancer's metrics for Prometheus."""

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proxies.balance.counts import BUCKETS_S
from proxies.balance.service import ServiceBalancer

_PREFIX = "mizzen_balancer"
_COUNTERS: tuple[tuple[str, str, Callable[[ServiceBalancer], int]], ...] = (
    ("requests", "Requests that began", lambda one: one.counts.totals.requests),
    (
        "requests_failed",
        "Requests that ended with a status of 500 or above, or without an answer",
        lambda one: one.counts.totals.failed,
    ),
    ("streams_cut", "Answers that broke off, not by the client", lambda one: one.counts.totals.cut),
    ("retries", "Repeated attempts to reach a replica", lambda one: one.counts.totals.retries),
    ("haproxy_restarts", "Restarts of HAProxy after it ended by itself", lambda one: one.restarts),
)
_GAUGES: tuple[tuple[str, str, Callable[[ServiceBalancer], float]], ...] = (
    ("haproxy_up", "1 if HAProxy runs, else 0", lambda one: float(one.is_up)),
    (
        "list_age_seconds",
        "Seconds since the list of replicas was fetched; not a number: not since the start",
        lambda one: time.monotonic() - one.fetched_s if one.fetched_s is not None else float("nan"),
    ),
    ("unsent_seconds", "Seconds whose counts the API has not got yet", lambda one: len(one.reports)),
)


class BalancerMetrics(Collector):
    """The metrics of all services of a balancer."""

    def __init__(self, balancers: Iterable[ServiceBalancer]) -> None:
        self._balancers = tuple(balancers)

    def collect(self) -> Iterable[Metric]:
        """Returns the current values for all services."""
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["service"])
            for one in self._balancers:
                counter.add_metric([one.name], count(one))
            yield counter
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["service"])
            for one in self._balancers:
                gauge.add_metric([one.name], value(one))
            yield gauge
        yield self._owners()
        yield self._replicas()
        yield self._times()

    def _owners(self) -> Metric:
        counter = CounterMetricFamily(
            f"{_PREFIX}_owner_requests", "Requests that ended, by the owner of their key", labels=["service", "owner"]
        )
        for one in self._balancers:
            for owner, count in sorted(one.counts.totals.by_owner.copy().items()):
                counter.add_metric([one.name, owner], count)
        return counter

    def _replicas(self) -> Metric:
        gauge = GaugeMetricFamily(
            f"{_PREFIX}_replicas", "Listed replicas that are ready, and servers that are drained",
            labels=["service", "state"],
        )  # fmt: skip
        for one in self._balancers:
            ready = sum(endpoint.state == "ready" for endpoint in one.service.endpoints)
            gauge.add_metric([one.name, "ready"], ready)
            gauge.add_metric([one.name, "draining"], one.draining)
        return gauge

    def _times(self) -> Metric:
        histogram = HistogramMetricFamily(
            f"{_PREFIX}_request_seconds", "Total time of answered requests with a status below 500", labels=["service"]
        )
        for one in self._balancers:
            totals = one.counts.totals
            buckets = [(str(most_s), float(n)) for most_s, n in zip(BUCKETS_S, totals.at_most, strict=True)]
            histogram.add_metric([one.name], [*buckets, ("+Inf", float(totals.answered))], totals.seconds)
        return histogram
