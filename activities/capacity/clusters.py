"""The clusters of pools: what their machines share follows from the offers."""

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from capacity.offers import Offer
from infra.db.models import Cluster


def keep_cluster(session: Session, region: str, name: str, offer: Offer) -> None:
    """Makes the cluster if it is not there, and sets its zone, kind and the price of the offer's machines.

    Prices of other types of machine stay. Where nothing changes nothing is written: prices have a history.
    """
    made = insert(Cluster).values(
        region=region, name=name, zone=offer.zone, capacity=offer.kind.value, prices=offer.prices()
    )
    session.execute(made.on_conflict_do_nothing())
    row = session.get_one(Cluster, (region, name), with_for_update=True)
    wanted = {"zone": offer.zone, "capacity": offer.kind.value, "prices": {**row.prices, **offer.prices()}}
    for field, value in wanted.items():
        if getattr(row, field) != value:
            setattr(row, field, value)
