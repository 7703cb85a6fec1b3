"""Prometheus metrics of services, read from Postgres."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.services.reading import service_views
from infra.db.services import ServiceRow

_LABELS = ["tenant", "service"]


def service_metrics(session: Session) -> Iterator[Metric]:
    """Yields the metric families of the services that have not ended."""
    ready = GaugeMetricFamily("mizzen_service_ready", "Ready replicas", labels=[*_LABELS, "kind", "zone"])
    gauges = {
        "target": GaugeMetricFamily("mizzen_service_target", "Replicas that should be ready", labels=_LABELS),
        "live": GaugeMetricFamily("mizzen_service_live", "Replicas that have not ended", labels=_LABELS),
        "availability": GaugeMetricFamily(
            "mizzen_service_availability", "Share of the time with enough ready replicas", labels=_LABELS
        ),
    }
    usd = {
        "usd": CounterMetricFamily("mizzen_service_usd", "Cost of its own machines, US dollars", labels=_LABELS),
        "usd_on_demand": CounterMetricFamily(
            "mizzen_service_on_demand_usd", "What its target would have cost on on-demand machines", labels=_LABELS
        ),
        "preemptions": CounterMetricFamily("mizzen_service_preemptions", "Preempted replicas", labels=_LABELS),
    }
    requests = GaugeMetricFamily(
        "mizzen_service_requests_per_second", "Requests of the last minute, as balancers counted them", labels=_LABELS
    )
    latency = GaugeMetricFamily(
        "mizzen_service_latency_seconds", "Time to the last byte in the last minute", labels=[*_LABELS, "quantile"]
    )
    live = select(ServiceRow).where(ServiceRow.ended_at.is_(None)).order_by(ServiceRow.tenant, ServiceRow.name)
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {**gauges, **usd}
    for view in service_views(session, session.scalars(live).all()):
        own = [view.tenant, view.name]
        for place, count in view.ready.items():
            kind, _, zone = place.partition(" ")
            ready.add_metric([*own, kind, zone], count)
        for name, family in families.items():
            if (value := getattr(view, name)) is not None:
                family.add_metric(own, float(value))
        if view.requests is not None:
            requests.add_metric(own, view.requests.per_s)
            for quantile, value in (("0.5", view.requests.p50_s), ("0.99", view.requests.p99_s)):
                if value is not None:
                    latency.add_metric([*own, quantile], value)
    yield from (ready, *families.values(), requests, latency)
