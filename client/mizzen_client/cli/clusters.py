"""Commands about clusters: their machines, and the settings that operators set."""

from collections.abc import Mapping
from typing import Any

import click

from mizzen.cli.printer import Column, emit_list
from mizzen_client.cli import formats
from mizzen_client.cli.fleet import PLACE_COLUMNS, amounts_option
from mizzen_client.cli.numbers import Number
from mizzen_client.cli.session import Commands, Session, complete_cluster, complete_region, split_place

_CLUSTER_COLUMNS = (
    Column("REGION", lambda c: c["region"]),
    *PLACE_COLUMNS,
    Column("ZONE", lambda c: c.get("zone"), drop=3),
    Column("CAPACITY", lambda c: str(c.get("capacity", "reserved")).replace("_", " "), drop=2),
    Column("TENANT", lambda c: c["tenant"], wide=True),
    Column("USD/H", lambda c: formats.pairs(c.get("prices", {})), drop=4, flexible=True),
    Column("STORE", lambda c: c.get("store_url"), wide=True),
    Column("LINK", lambda c: f"{c['link_mbit']:g} Mbit/s" if c.get("link_mbit") else None, wide=True),
    Column("MANAGER", lambda c: c["manager"], wide=True),
)


@click.group(cls=Commands)
def clusters() -> None:
    """List clusters; set their zones, capacity kinds, prices and stores."""


def _cluster(item: Mapping[str, Any]) -> str:
    return f"{item['region']}/{item['name']}"


@clusters.command("list")
@click.option("--region", shell_complete=complete_region, help="List only the clusters of this region.")
@click.pass_obj
def list_clusters(session: Session, region: str | None) -> None:
    """List clusters."""
    emit_list(session, session.client.clusters(region), _CLUSTER_COLUMNS, name=_cluster)


@clusters.command("set")
@click.argument("cluster", metavar="REGION/CLUSTER", shell_complete=complete_cluster)
@click.option("--zone", help="The zone of its machines, by the platform's name, such as us-east-1b.")
@click.option(
    "--capacity",
    type=click.Choice(["reserved", "on_demand", "spot", "voluntary"]),
    help="How its machines are obtained.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="TYPE=USD",
    callback=amounts_option("US dollars an hour"),
    help="Price per hour, in US dollars, of one GPU of a type or of one core (cpu=0.04); repeatable.",
)
@click.option("--no-prices", is_flag=True, help="Remove all prices.")
@click.option("--store", metavar="URL", help="Save checkpoints of workloads that run there in this store.")
@click.option("--no-store", is_flag=True, help="Save these checkpoints in the region's bucket.")
@click.option(
    "--link-mbit",
    type=Number(min=0, min_open=True),
    help="Bandwidth of its link to the other clusters of the region, in Mbit/s.",
)
@click.pass_obj
def set_cluster(
    session: Session,
    cluster: str,
    *,
    zone: str | None,
    capacity: str | None,
    prices: dict[str, float],
    no_prices: bool,
    store: str | None,
    no_store: bool,
    link_mbit: float | None,
) -> None:
    """Set the zone, capacity kind, prices, store and link of a cluster (operators).

    If prices are given, they replace all earlier prices of the cluster. They apply from now on. A new store applies to
    attempts that start from now on; checkpoints are copied there when a workload starts there again.
    """
    region, name = split_place(cluster, "REGION/CLUSTER")
    settings: dict[str, Any] = {key: value for key, value in (("zone", zone), ("capacity", capacity)) if value}
    if prices or no_prices:
        settings["prices"] = prices
    if store and no_store:
        raise click.UsageError("give --store or --no-store, not both")
    if store or no_store:
        settings["store_url"] = store
    if link_mbit is not None:
        settings["link_mbit"] = link_mbit
    if not settings:
        raise click.UsageError(
            "nothing to set: give --zone, --capacity, --price, --store, --link-mbit, --no-prices or --no-store"
        )
    emit_list(session, [session.client.set_cluster(region, name, **settings)], _CLUSTER_COLUMNS, name=_cluster)
