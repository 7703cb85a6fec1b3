"""The clusters of pools: their zone, capacity kind and prices follow from the offers."""

from collections.abc import Sequence

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from capacity.offers import Offer
from infra.db.models import Cluster


def make_cluster(session: Session, region: str, name: str, offer: Offer, service: str | None = None) -> None:
    """Creates the cluster for an offer's machines if it does not exist.

    `service`: the id of the service whose replicas are the only workloads on the machines; None: they are shared.
    """
    made = insert(Cluster).values(
        region=region, name=name, zone=offer.zone, capacity=offer.kind.value, prices=offer.prices(), service=service
    )
    session.execute(made.on_conflict_do_nothing())


def set_prices(session: Session, region: str, name: str, offers: Sequence[Offer]) -> None:
    """Updates zone, capacity kind and prices of a cluster from the offers of its machines.

    If prices for one GPU type differ, the highest is used. Prices of types without an offer stay. Unchanged values are
    not written, because each write adds to the history of prices.
    """
    prices: dict[str, float] = {}
    for offer in offers:
        for resource, usd_per_h in offer.prices().items():
            prices[resource] = max(usd_per_h, prices.get(resource, 0.0))
    # FOR NO KEY UPDATE: registering a machine locks the row's key for its foreign key, and must not wait for this.
    row = session.get_one(Cluster, (region, name), with_for_update={"key_share": True})
    wanted = {"zone": offers[0].zone, "capacity": offers[0].kind.value, "prices": {**row.prices, **prices}}
    for field, value in wanted.items():
        if getattr(row, field) != value:
            setattr(row, field, value)
