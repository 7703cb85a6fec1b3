"""Commands about the fleet and the data: regions, clusters, machines and tables."""

from collections.abc import Mapping
from typing import IO, Any

import click

from mizzen.cli import words
from mizzen.cli.exits import exit_of
from mizzen.cli.output import Column, dump, emit_list, emit_one
from mizzen.cli.session import Command, Commands, Session, complain, finish
from mizzen.client.errors import ClientError


def _name(item: Mapping[str, Any]) -> str:
    return str(item["name"])


def _counts(place: Mapping[str, Any]) -> str:
    counts = place["machines"]
    others = ", ".join(f"{counts[state]} {state}" for state in ("joining", "lost", "cordoned") if counts[state])
    return f"{counts['ready']} ready{f', {others}' if others else ''}"


def _gpus(place: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind} {slots['held']}/{slots['total']}" for kind, slots in sorted(place["gpus"].items()))


_PLACE_COLUMNS = (
    Column("NAME", _name),
    Column("MACHINES", _counts, drop=1),
    Column("GPUS HELD/ALL", _gpus, flexible=True),
)
_REGION_COLUMNS = (
    *_PLACE_COLUMNS,
    Column("CLUSTERS", lambda r: ", ".join(r["clusters"]), drop=2, flexible=True),
    Column("BUCKET", lambda r: r["bucket_url"], wide=True),
)
_CLUSTER_COLUMNS = (
    Column("REGION", lambda c: c["region"]),
    *_PLACE_COLUMNS,
    Column("MANAGER", lambda c: c["manager"], drop=2),
)


def _state(machine: Mapping[str, Any]) -> str:
    if machine["state"] != "ready":
        return str(machine["state"])
    return "draining" if machine["draining"] else "cordoned" if machine["cordon"] else "ready"


def _slots(machine: Mapping[str, Any]) -> str | None:
    return f"{machine['gpu_type']} {len(machine['slots_held'])}/{machine['gpus']}" if machine["gpus"] else None


_MACHINE_COLUMNS = (
    Column("ID", lambda m: m["id"]),
    Column("STATE", _state),
    Column("GPUS HELD/ALL", _slots),
    Column("FREE CPUS", lambda m: f"{m['free_cpus']:g}/{m['cpus']:g}", drop=2, right=True),
    Column("FREE MEMORY", lambda m: words.size(m["free_memory_bytes"]), drop=3, right=True),
    Column("RACK", lambda m: m["rack"], wide=True),
    Column("ADDRESS", lambda m: m["address"], wide=True),
    Column("WHY", lambda m: words.reason(m["cordon"]), drop=1, flexible=True),
)


@click.command(cls=Command)
@click.pass_obj
def regions(session: Session) -> None:
    """List regions."""
    emit_list(session, session.client.regions(), _REGION_COLUMNS, name=_name)


@click.command(cls=Command)
@click.argument("file", type=click.File("w", lazy=True, atomic=True), default="-")
@click.pass_obj
def export(session: Session, file: IO[str]) -> None:
    """Write a snapshot of the fleet for the simulator: machines, tenants and live workloads, to FILE (default: stdout).

    `mizzen simulate --from-live FILE` starts from it.
    """
    file.write(dump(session.client.snapshot(), "yaml" if session.output == "yaml" else "json").rstrip("\n") + "\n")


@click.command(cls=Command)
@click.option("--region", help="Only in this region.")
@click.pass_obj
def clusters(session: Session, region: str | None) -> None:
    """List clusters."""
    items = session.client.clusters(region)
    emit_list(session, items, _CLUSTER_COLUMNS, name=lambda c: f"{c['region']}/{c['name']}")


@click.group(cls=Commands)
def machines() -> None:
    """List machines; cordon or drain them (operators)."""


@machines.command("list")
@click.option("--region", help="Only in this region.")
@click.option("--cluster", help="Only in this cluster.")
@click.pass_obj
def list_machines(session: Session, region: str | None, cluster: str | None) -> None:
    """List machines with what is free on them."""
    emit_list(session, session.client.machines(region, cluster), _MACHINE_COLUMNS)


def _set(session: Session, machine_ids: tuple[str, ...], action: str, reason: str | None = None) -> None:
    done, code = [], 0
    for machine in machine_ids:
        try:
            done.append(session.client.set_machine(machine, action, reason))
        except ClientError as error:
            complain(error, f"{machine}: ")
            code = code or exit_of(error)
    if done:
        emit_list(session, done, _MACHINE_COLUMNS)
    finish(code)


_IDS = click.argument("machine_ids", nargs=-1, required=True, metavar="REGION/CLUSTER/MACHINE...")


@machines.command()
@_IDS
@click.option("--reason", help="Why, for others to read.")
@click.pass_obj
def cordon(session: Session, machine_ids: tuple[str, ...], reason: str | None) -> None:
    """Place no new work on machines; what runs there goes on."""
    _set(session, machine_ids, "cordon", reason)


@machines.command()
@_IDS
@click.pass_obj
def uncordon(session: Session, machine_ids: tuple[str, ...]) -> None:
    """Let new work be placed on machines again."""
    _set(session, machine_ids, "uncordon")


@machines.command()
@_IDS
@click.pass_obj
def drain(session: Session, machine_ids: tuple[str, ...]) -> None:
    """Move all work away from machines, after a checkpoint."""
    _set(session, machine_ids, "drain")


@machines.command()
@_IDS
@click.pass_obj
def undrain(session: Session, machine_ids: tuple[str, ...]) -> None:
    """Take back a drain."""
    _set(session, machine_ids, "undrain")


def _replicas(table: Mapping[str, Any]) -> str:
    parts = []
    for replica in table["replicas"]:
        done = f" ({words.size(replica['done_bytes'])} copied)" if replica["state"] != "ready" else ""
        parts.append(replica["region"] + done)
    return ", ".join(parts)


_TABLE_COLUMNS = (
    Column("NAME", _name),
    Column("SIZE", lambda t: words.size(t["size_bytes"]), right=True),
    Column("HOME", lambda t: t["home_region"], drop=1),
    Column("REPLICAS", _replicas, flexible=True),
)


@click.group(cls=Commands)
def tables() -> None:
    """List input tables; add or copy them."""


@tables.command("list")
@click.pass_obj
def list_tables(session: Session) -> None:
    """List tables and where their replicas are."""
    emit_list(session, session.client.tables(), _TABLE_COLUMNS, name=_name)


@tables.command()
@click.argument("name")
@click.option("--home-region", required=True, help="The region in whose bucket it is, under tables/NAME/.")
@click.pass_obj
def add(session: Session, name: str, home_region: str) -> None:
    """Register the objects under tables/NAME/ of a region's bucket as a table."""
    emit_list(session, [session.client.add_table(name, home_region)], _TABLE_COLUMNS, name=_name)


@tables.command()
@click.argument("name")
@click.argument("region")
@click.pass_obj
def replicate(session: Session, name: str, region: str) -> None:
    """Start a copy of a table to a region (operators)."""
    session.client.replicate_table(name, region)
    emit_list(session, [session.client.table(name)], _TABLE_COLUMNS, name=_name)


@tables.command()
@click.argument("name")
@click.pass_obj
def rm(session: Session, name: str) -> None:
    """Forget a table."""
    session.client.remove_table(name)
    emit_one(session, {"removed": name}, lambda: name, name=name)
