"""Commands about tables, their partitions and replicas."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from mizzen.cli.printer import Column, emit_list, emit_one, name_of
from mizzen_client.cli import formats
from mizzen_client.cli.session import (
    REGION,
    TABLE,
    Commands,
    Session,
    complete_region,
    complete_table,
    confirm,
    duration,
)

_LOOK_S = 0.5
_OVERDUE = timedelta(minutes=30)
"""A replica is marked if its deletion has been due for longer than this. Deletions run every few minutes."""


def _replicas(table: Mapping[str, Any]) -> str:
    return ", ".join(replica["region"] + _said(replica) for replica in table["replicas"])


def _said(replica: Mapping[str, Any]) -> str:
    said = ", ".join(word for word in (_checked(replica), _stands(replica)) if word)
    return f" ({said})" if said else ""


def _checked(replica: Mapping[str, Any]) -> str:
    if replica["wrong_since"] is not None:
        return f"wrong for {formats.between(replica['wrong_since'], None)}: {replica['wrong']}"
    return "not verified" if replica["state"] == "ready" and replica["verified_at"] is None else ""


def _stands(replica: Mapping[str, Any]) -> str:
    if replica["state"] == "copying":
        return f"{formats.size(replica['done_bytes'])} copied"
    if replica["state"] == "deleting":
        kept = replica["kept_because"]
        if kept is not None:
            return f"kept: {kept}"
        late = datetime.now(UTC) - datetime.fromisoformat(replica["delete_at"]) > _OVERDUE
        said = "not deleted although due" if late else "to be deleted"
        return f"{said} at {formats.clock(replica['delete_at'])}"
    if not replica["whole"]:
        return formats.plural(replica["partitions"], "partition")
    if replica["stale_since"] is not None:
        said = f"stale for {formats.between(replica['stale_since'], None)}"
        return said + (", being refreshed" if replica["topping_up"] else "")
    return ""


_TABLE_COLUMNS = (
    Column("NAME", name_of),
    Column("SIZE", lambda t: formats.size(t["size_bytes"]), right=True),
    Column("HOME", lambda t: t["home_region"], drop=1),
    Column("REPLICAS", _replicas, flexible=True),
)
_PARTITION_COLUMNS = (
    Column("NAME", name_of),
    Column("SIZE", lambda p: formats.size(p["size_bytes"]), right=True),
    Column("CREATED", lambda p: formats.ago(p["created_at"]), drop=1),
    Column("CHECKSUM", lambda p: p["checksum"], drop=2, flexible=True),
    Column("LOCATION", lambda p: p["location"], wide=True),
)


@click.group(cls=Commands)
def tables() -> None:
    """List input tables; add, extend, copy and verify them."""


@tables.command("list")
@click.option("--namespace", help="List only the tables of this namespace; names without a dot are in `default`.")
@click.pass_obj
def list_tables(session: Session, namespace: str | None) -> None:
    """List tables and the regions of their replicas."""
    emit_list(session, session.client.tables(namespace), _TABLE_COLUMNS, name=name_of)


@tables.command()
@click.argument("name")
@click.option(
    "--home-region",
    required=True,
    shell_complete=complete_region,
    help="The region whose bucket holds the table, under tables/NAME/.",
)
@click.pass_obj
def add(session: Session, name: str, home_region: str) -> None:
    """Register the objects under tables/NAME/ of a region's bucket as a table: NAME, or NAMESPACE.NAME.

    If all objects are in subfolders, each subfolder is a partition.
    """
    emit_list(session, [session.client.add_table(name, home_region)], _TABLE_COLUMNS, name=name_of)


@tables.command()
@TABLE
@click.pass_obj
def partitions(session: Session, name: str) -> None:
    """List a table's partitions."""
    emit_list(session, list(session.client.partitions(name)), _PARTITION_COLUMNS, name=name_of)


@tables.command()
@TABLE
@click.argument("partition")
@click.option("--bytes", "size_bytes", type=click.IntRange(min=0), required=True, help="Total size of its objects.")
@click.option(
    "--checksum", metavar="sha256:HEX", help="SHA-256 of the output of sha256sum for its objects, sorted by path."
)
@click.pass_obj
def append(session: Session, name: str, partition: str, size_bytes: int, checksum: str | None) -> None:
    """Append a partition whose objects are under tables/NAME/PARTITION/ of the home region's bucket (operators).

    A partition cannot be changed later. Appending an identical partition again has no effect.
    """
    given = {"name": partition, "size_bytes": size_bytes, "checksum": checksum}
    emit_list(session, session.client.append_partitions(name, [given]), _PARTITION_COLUMNS, name=name_of)


@tables.command()
@TABLE
@REGION
@click.pass_obj
def replicate(session: Session, name: str, region: str) -> None:
    """Start copying a table to a region, or the partitions that a stale replica there lacks (operators)."""
    session.client.replicate_table(name, region)
    emit_list(session, [session.client.table(name)], _TABLE_COLUMNS, name=name_of)


@tables.command()
@click.argument("name", required=False, shell_complete=complete_table)
@click.option("--region", shell_complete=complete_region, help="Verify only the replicas in this region.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until everything has been read.")
@click.pass_obj
def verify(session: Session, name: str | None, region: str | None, wait: bool) -> None:
    """Read the replicas of a table, or of all tables, in full and compare them with their checksums (operators).

    The exit code is 1 if a replica is wrong. Wrong objects are repaired from another region.
    """
    names = [name] if name is not None else [t["name"] for t in session.client.tables() if _in(t, region)]
    asked = {table: session.client.verify_table(table, region) for table in names}
    tables_: list[Mapping[str, Any]] = [session.client.table(table) for table in names]
    wrong: set[str] = set()
    while wait and (todo := [t for t in tables_ if not _verified(t, asked[t["name"]], wrong)]):
        time.sleep(_LOOK_S)
        again = {t["name"] for t in todo}
        tables_ = [session.client.table(t["name"]) if t["name"] in again else t for t in tables_]
    emit_list(session, tables_, _TABLE_COLUMNS, name=name_of)
    if wrong:
        click.echo(f"wrong replicas: {', '.join(sorted(wrong))}", err=True)
        raise click.exceptions.Exit(1)


def _in(table: Mapping[str, Any], region: str | None) -> bool:
    return region is None or any(r["region"] == region and r["state"] != "deleting" for r in table["replicas"])


def _verified(table: Mapping[str, Any], asked: Mapping[str, Any], wrong: set[str]) -> bool:
    """Return whether all replicas that were to be verified have been read. Add the wrong replicas to `wrong`."""
    at = datetime.fromisoformat(asked["asked_at"])
    over = True
    for replica in table["replicas"]:
        if replica["region"] not in asked["regions"] or replica["state"] == "deleting":
            continue
        if replica["wrong_since"] is not None:
            wrong.add(f"{table['name']} in {replica['region']}")
        elif replica["verified_at"] is None or datetime.fromisoformat(replica["verified_at"]) < at:
            over = over and replica["state"] != "ready"
    return over


@tables.command("drop-replica")
@TABLE
@REGION
@click.option("--grace", "grace_s", callback=duration(above_zero=False), metavar="DURATION",
              help="How long the replica can be restored. Default: the installation's setting.")  # fmt: skip
@click.pass_obj
def drop_replica(session: Session, name: str, region: str, grace_s: float | None) -> None:
    """Drop a table's replica in a region (operators). No new job reads it, and it is deleted after a grace period.

    A request for the table in that region restores the replica during the grace period.
    """
    session.client.drop_replica(name, region, grace_s)
    emit_list(session, [session.client.table(name)], _TABLE_COLUMNS, name=name_of)


@tables.command()
@TABLE
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def rm(session: Session, name: str, yes: bool) -> None:
    """Remove a table from the catalogue, after confirmation."""
    confirm(f"remove table {name} with its partitions and replicas from the catalogue?", yes)
    session.client.remove_table(name)
    emit_one(session, {"removed": name}, lambda: name, name=name)
