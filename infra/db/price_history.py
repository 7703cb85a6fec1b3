"""Price history: prices of clusters, prices of launched instances, and refused launches."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from infra.db.capacity import InstanceRow, LaunchRefusal
from infra.db.models import Cluster, ClusterPrice

Prices = dict[str, list[tuple[datetime, float]]]


def cluster_prices(session: Session, since: datetime, until: datetime) -> Prices:
    """Returns the prices in US dollars an hour since `since`, by `region/cluster resource`, with their start times."""
    begin = func.greatest(ClusterPrice.since, since)
    found = session.execute(
        select(ClusterPrice.region, ClusterPrice.cluster, ClusterPrice.prices, begin)
        .join(Cluster, (Cluster.region == ClusterPrice.region) & (Cluster.name == ClusterPrice.cluster))
        .where(ClusterPrice.since < until)
        .order_by(ClusterPrice.region, ClusterPrice.cluster, ClusterPrice.since)
    )
    out: Prices = defaultdict(list)
    for region, cluster, prices, at in found:
        for resource, usd in prices.items():
            values = out[f"{region}/{cluster} {resource}"]
            if at <= since:
                values.clear()
            values.append((at, float(usd)))
    return dict(out)


def offers(session: Session, since: datetime, most: int) -> Prices:
    """Returns the prices at which instances were requested since `since`, by zone, kind and machine type.

    Returns at most `most` offers, the most frequently used ones.
    """
    of = (InstanceRow.zone, InstanceRow.kind, InstanceRow.machine_type)
    recent = InstanceRow.requested_at >= since
    often = select(*of).where(recent).group_by(*of).order_by(func.count().desc(), *of).limit(most).subquery()
    found = session.execute(
        select(*of, InstanceRow.requested_at, InstanceRow.usd_per_h)
        .join(
            often,
            (often.c.zone == InstanceRow.zone)
            & (often.c.kind == InstanceRow.kind)
            & (often.c.machine_type == InstanceRow.machine_type),
        )
        .where(recent)
        .order_by(*of, InstanceRow.requested_at)
    )
    out: Prices = defaultdict(list)
    for zone, kind, machine_type, at, usd in found:
        out[f"{zone} {kind} {machine_type}"].append((at, usd))
    return dict(out)


@dataclass(frozen=True)
class RefusedLaunches:
    """The launches of one kind of machine that a provider has refused."""

    provider: str
    zone: str
    kind: str
    machine_type: str
    refusal: str
    count: int
    last_at: datetime
    words: str
    """The provider's message at the last refusal."""


def refused_launches(session: Session, since: datetime, limit: int) -> list[RefusedLaunches]:
    """Returns the refusals since `since`, the latest first, at most `limit`."""
    of = (
        LaunchRefusal.provider, LaunchRefusal.zone, LaunchRefusal.kind, LaunchRefusal.machine_type,
        LaunchRefusal.refusal,
    )  # fmt: skip
    last = func.max(LaunchRefusal.at)
    words = func.array_agg(aggregate_order_by(LaunchRefusal.words, LaunchRefusal.at.desc()))
    found = session.execute(
        select(*of, func.count(), last, words)
        .where(LaunchRefusal.at >= since).group_by(*of).order_by(last.desc(), *of).limit(limit)
    )  # fmt: skip
    return [
        RefusedLaunches(provider, zone, kind, machine_type, refusal, count, last_at, said[0])
        for provider, zone, kind, machine_type, refusal, count, last_at, said in found
    ]
