"""The clusters of pools: what their machines share follows from the offers."""

from collections.abc import Sequence

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from capacity.offers import Offer
from infra.db.models import Cluster


def make_cluster(session: Session, region: str, name: str, offer: Offer) -> None:
    """Makes the cluster of an offer's machines if it is not there."""
    made = insert(Cluster).values(
        region=region, name=name, zone=offer.zone, capacity=offer.kind.value, prices=offer.prices()
    )
    session.execute(made.on_conflict_do_nothing())


def set_prices(session: Session, region: str, name: str, offers: Sequence[Offer]) -> None:
    """Sets zone, kind and prices by the offers of which the cluster has machines.

    Where they differ for one GPU type the highest counts. Prices of other types stay. Where nothing changes nothing is
    written: prices have a history.
    """
    prices: dict[str, float] = {}
    for offer in offers:
        for resource, usd_per_h in offer.prices().items():
            prices[resource] = max(usd_per_h, prices.get(resource, 0.0))
    # NO KEY UPDATE: registering a machine locks the row's key for its foreign key, and need not wait for this.
    row = session.get_one(Cluster, (region, name), with_for_update={"key_share": True})
    wanted = {"zone": offers[0].zone, "capacity": offers[0].kind.value, "prices": {**row.prices, **prices}}
    for field, value in wanted.items():
        if getattr(row, field) != value:
            setattr(row, field, value)
