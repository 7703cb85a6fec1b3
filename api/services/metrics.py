"""Prometheus metrics of services, read from Postgres: with a key those of each service, without a key only sums."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import select, true
from sqlalchemy.orm import Session

from api.services.service_queries import service_views
from api.services.views import ServiceView
from infra.db.services import ServiceRow

_LABELS = ["tenant", "service"]


def service_totals(session: Session) -> Iterator[Metric]:
    """Yields sums over the services that have not ended. They name no tenant and no service."""
    views = _live_services(session, None)
    ready: Counter[str] = Counter()
    for view in views:
        for place, count in view.ready.items():
            ready[place.partition(" ")[0]] += count
    by_kind = GaugeMetricFamily("mizzen_services_ready", "Ready replicas of all services", labels=["kind"])
    for kind, count in sorted(ready.items()):
        by_kind.add_metric([kind], count)
    yield by_kind
    per_s = sum(view.requests.per_s for view in views if view.requests is not None)
    for name, text, value in (
        ("mizzen_services", "Services that have not ended", len(views)),
        ("mizzen_services_target", "Replicas of all services that should be ready", sum(v.target for v in views)),
        ("mizzen_services_live", "Replicas of all services that have not ended", sum(v.live for v in views)),
        ("mizzen_services_requests_per_second", "Requests of the last minute, as balancers counted them", per_s),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def _live_services(session: Session, tenant: str | None) -> list[ServiceView]:
    own = true() if tenant is None else ServiceRow.tenant == tenant
    live = select(ServiceRow).where(ServiceRow.ended_at.is_(None), own).order_by(ServiceRow.tenant, ServiceRow.name)
    return service_views(session, session.scalars(live).all())


def service_metrics(session: Session, tenant: str | None) -> Iterator[Metric]:
    """Yields the metric families of the services of a tenant, or of all (None), that have not ended."""
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
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {**gauges, **usd}
    for view in _live_services(session, tenant):
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
