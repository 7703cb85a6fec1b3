"""Commands about the fleet: regions, machines, costs and snapshots."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import IO, Any

import click

from mizzen.cli.printer import Column, cell, dump, emit_list, emit_one, name_of, table
from mizzen_client.cli import formats
from mizzen_client.cli.session import (
    Commands,
    OutputCommand,
    Session,
    complete_machine,
    complete_region,
    complete_tenant,
    finish,
    labels,
    say,
)


def _counts(place: Mapping[str, Any]) -> str:
    counts = place["machines"]
    others = ", ".join(f"{counts[state]} {state}" for state in ("joining", "lost", "cordoned") if counts[state])
    return f"{counts['ready']} ready{f', {others}' if others else ''}"


def _gpus(place: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind} {slots['held']}/{slots['total']}" for kind, slots in sorted(place["gpus"].items()))


PLACE_COLUMNS = (
    Column("NAME", name_of),
    Column("MACHINES", _counts, drop=1),
    Column("GPUS HELD/ALL", _gpus, flexible=True),
)


def _answers(region: Mapping[str, Any]) -> str:
    state, since = region.get("state", "answering"), region.get("state_since")
    shown = str(state).replace("_", " ")
    return f"{shown} for {formats.between(since, None)}" if since else shown


REGION_COLUMNS = (
    Column("NAME", name_of),
    Column("STATE", _answers),
    *PLACE_COLUMNS[1:],
    Column("CLUSTERS", lambda r: ", ".join(r["clusters"]), drop=2, flexible=True),
    Column("STORAGE", lambda r: None if r["storage_bytes"] is None else formats.size(r["storage_bytes"]), drop=3),
    Column("CPU HOURS", lambda r: formats.pairs(r["cpu_hours"]), wide=True),
    Column("BUCKET", lambda r: r["bucket_url"], wide=True),
    Column("BUCKET ERROR", lambda r: r.get("bucket_error"), wide=True),
)
_LOOP_COLUMNS = (
    Column("NAME", name_of),
    Column("STATE", lambda loop: loop["state"]),
    Column("LAST SUCCESS", lambda loop: formats.ago(loop["succeeded_at"]) if loop["succeeded_at"] else "never"),
    Column("FAILURES", lambda loop: loop["failures"], right=True),
    Column("ERROR", lambda loop: loop["error"], flexible=True),
)
_COST_COLUMNS = (
    Column("DAY", lambda c: c["day"]),
    Column("TENANT", lambda c: c["tenant"]),
    Column("CAPACITY", lambda c: c["capacity"].replace("_", " "), drop=2),
    Column("RESOURCE", lambda c: c["resource"]),
    Column("HOURS", lambda c: formats.hours(c["hours"]), right=True),
    Column("UNPRICED HOURS", lambda c: formats.hours(c["unpriced_h"]) if c["unpriced_h"] else None, right=True, drop=3),
    Column("COST", lambda c: formats.usd(c["usd"]), right=True),
)


def _state(machine: Mapping[str, Any]) -> str:
    if machine["state"] != "ready":
        return str(machine["state"])
    return "draining" if machine["draining"] else "cordoned" if machine["cordon"] else "ready"


def _slots(machine: Mapping[str, Any]) -> str | None:
    return f"{machine['gpu_type']} {len(machine['slots_held'])}/{machine['gpus']}" if machine["gpus"] else None


def _why_closed(machine: Mapping[str, Any]) -> str | None:
    """Return why a machine, or some of its GPUs, take no work."""
    unfreed = machine.get("slots_unfreed") or []
    withheld = [slot for slot in machine.get("slots_withheld") or [] if slot not in unfreed]
    if machine["cordon"] is None and (withheld or unfreed):
        taken = f"the owner has taken back GPU {', '.join(map(str, withheld))}" if withheld else ""
        left = f"memory of GPU {', '.join(map(str, unfreed))} was not freed by an ended task" if unfreed else ""
        return "; ".join(filter(None, (taken, left)))
    return formats.reason(machine["cordon"])


def _isolation(machine: Mapping[str, Any]) -> str:
    why = machine["isolation_why"]
    return f"{machine['isolation']}: {why}" if why else str(machine["isolation"])


_MACHINE_COLUMNS = (
    Column("ID", lambda m: m["id"]),
    Column("STATE", _state),
    Column("GPUS HELD/ALL", _slots),
    Column("FREE CPUS", lambda m: f"{m['free_cpus']:g}/{m['cpus']:g}", drop=2, right=True),
    Column("FREE MEMORY", lambda m: formats.size(m["free_memory_bytes"]), drop=3, right=True),
    Column("RACK", lambda m: m["rack"], wide=True),
    Column("ADDRESS", lambda m: m["address"], wide=True),
    Column("REASON", _why_closed, drop=1, flexible=True),
    Column("ENGINE", lambda m: m["engine"], wide=True),
    Column("ISOLATION", _isolation, drop=4, flexible=True),
)


@click.group(cls=Commands)
def regions() -> None:
    """List regions; set their storage limits and CPU quotas."""


@regions.command("list")
@click.pass_obj
def list_regions(session: Session) -> None:
    """List regions."""
    emit_list(session, session.client.regions(), REGION_COLUMNS, name=name_of)


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else formats.bytes_of(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


def amounts_option(must_be: str) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], dict[str, float]]:
    """Return an option callback that reads repeated `name=number` values into a mapping.

    Args:
        must_be: what each number is, for the error message.
    """

    def read(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
        amounts = {}
        for name, amount in labels(context, parameter, values).items():
            try:
                amounts[name] = float(amount)
            except ValueError:
                raise click.BadParameter(f"{name}={amount}: must be {must_be}", context, parameter) from None
        return amounts

    return read


@regions.command("set")
@click.argument("name", shell_complete=complete_region)
@click.option(
    "--storage",
    metavar="SIZE",
    callback=_size,
    help="Maximum total size of tables in the region's bucket, such as 5PB.",
)
@click.option(
    "--cpu-hours",
    multiple=True,
    metavar="APP=HOURS",
    callback=amounts_option("a number of hours"),
    help="Quota of CPU hours a day for the jobs of an app; repeatable.",
)
@click.option("--no-cpu-hours", is_flag=True, help="Remove the quotas of all apps.")
@click.pass_obj
def set_region(
    session: Session, name: str, storage: int | None, cpu_hours: dict[str, float], no_cpu_hours: bool
) -> None:
    """Set a region's limit on table storage and its daily quotas of CPU hours for apps (operators).

    If quotas are given, they replace all earlier quotas of the region.
    """
    settings: dict[str, Any] = {} if storage is None else {"storage_bytes": storage}
    if cpu_hours or no_cpu_hours:
        settings["cpu_hours"] = cpu_hours
    if not settings:
        raise click.UsageError("nothing to set: give --storage, --cpu-hours or --no-cpu-hours")
    emit_list(session, [session.client.set_region(name, **settings)], REGION_COLUMNS, name=name_of)


def _remove(session: Session, names: tuple[str, ...], remove: Callable[[str], None]) -> None:
    def remove_one(name: str) -> None:
        remove(name)
        emit_one(session, {"removed": name}, lambda: f"removed {name}", name=name)

    _, code = session.each_name(names, remove_one)
    finish(code)


@regions.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_region)
@click.pass_obj
def remove_regions(session: Session, names: tuple[str, ...]) -> None:
    """Remove regions that have no machines, data or placed workloads (operators). Their buckets are not changed."""
    _remove(session, names, session.client.remove_region)


@click.command(cls=OutputCommand)
@click.argument("file", type=click.File("w", lazy=True, atomic=True), default="-")
@click.pass_obj
def export(session: Session, file: IO[str]) -> None:
    """Write a snapshot of the fleet for the simulator to FILE (default: stdout).

    The snapshot holds the machines, tenants and live workloads. `mizzen simulate --from-live FILE` starts from it.
    """
    file.write(dump(session.client.snapshot(), "yaml" if session.output == "yaml" else "json").rstrip("\n") + "\n")


@click.command(cls=OutputCommand)
@click.option(
    "--from",
    "first",
    type=click.DateTime(["%Y-%m-%d"]),
    help="First day (UTC). Default: the 7 days that end with --to.",
)
@click.option("--to", "last", type=click.DateTime(["%Y-%m-%d"]), help="Last day (UTC). Default: today.")
@click.option("--tenant", shell_complete=complete_tenant, help="Show only the costs of this tenant.")
@click.pass_obj
def costs(session: Session, first: datetime | None, last: datetime | None, tenant: str | None) -> None:
    """Show the costs of workloads.

    Costs are listed by day, tenant, capacity kind and resource, at the prices of the clusters.
    """
    first_day, last_day = (None if day is None else day.date().isoformat() for day in (first, last))
    items = session.client.costs(first_day, last_day, tenant)
    emit_list(session, items, _COST_COLUMNS, name=lambda c: f"{c['day']}/{c['tenant']}/{c['capacity']}/{c['resource']}")
    if items and session.output in ("table", "wide"):
        say(f"{formats.usd(sum(item['usd'] for item in items))} in total")


@click.command(cls=OutputCommand)
@click.pass_obj
def loops(session: Session) -> None:
    """Show whether housekeeping and other periodic loops succeed (operators).

    A failed round is tried again. The state `failing` means that several rounds in a row have failed.
    """
    emit_list(session, session.client.loops(), _LOOP_COLUMNS, name=name_of)


@click.group(cls=Commands)
def machines() -> None:
    """List machines; cordon or drain them (operators)."""


@machines.command("list")
@click.option("--region", shell_complete=complete_region, help="List only the machines of this region.")
@click.option("--cluster", help="List only the machines of clusters with this name.")
@click.pass_obj
def list_machines(session: Session, region: str | None, cluster: str | None) -> None:
    """List machines with their free resources."""
    emit_list(session, session.client.machines(region, cluster), _MACHINE_COLUMNS)


_GUEST_COLUMNS = (
    Column("WORKLOAD", lambda g: g["workload"]),
    Column("NAME", lambda g: g["name"], flexible=True),
    Column("TENANT", lambda g: g["tenant"]),
    Column("GPUS", lambda g: ",".join(map(str, g["slots"])) or None),
    Column("CPUS", lambda g: f"{g['cpus']:g}", drop=1, right=True),
    Column("SINCE", lambda g: formats.ago(g["since"])),
)


@machines.command()
@click.argument("machine_id", metavar="REGION/CLUSTER/MACHINE", shell_complete=complete_machine)
@click.pass_obj
def lending(session: Session, machine_id: str) -> None:
    """Show the workloads on a machine, their tenants, and how many GPU hours the machine has given.

    The machine's own key can read this too.
    """
    found = session.client.machine_lending(machine_id)
    emit_one(session, found, lambda: _lending_page(found), name=found["machine"])


def _lending_page(lending: Mapping[str, Any]) -> str:
    """Return the state of a machine, the GPU hours that it has given, and the workloads on it."""
    why = formats.reason(lending["cordon"] or lending["notice"])
    idle = ", takes no new work" if lending["state"] == "ready" and not lending["takes_work"] else ""
    lines = [cell(f"{lending['machine']}: {lending['state']}{idle}{f' - {why}' if why else ''}")]
    if lending["slots_withheld"]:
        lines.append(f"GPUs that the owner has taken back: {', '.join(map(str, lending['slots_withheld']))}")
    all_h, month_h = formats.hours(lending["given_gpu_h"]), formats.hours(lending["given_gpu_h_30d"])
    held_h = formats.hours(lending["held_gpu_h"])
    lines.append(f"{all_h} GPU hours given, {month_h} in the last 30 days; workloads held its GPUs for {held_h}")
    if lending["running"]:
        lines += ["", *table(lending["running"], _GUEST_COLUMNS, None)]
    return "\n".join(lines)


def _set(session: Session, machine_ids: tuple[str, ...], action: str, reason: str | None = None) -> None:
    done, code = session.each_name(machine_ids, lambda id_: session.client.set_machine(id_, action, reason))
    if done:
        emit_list(session, done, _MACHINE_COLUMNS)
    finish(code)


_IDS = click.argument(
    "machine_ids", nargs=-1, required=True, metavar="REGION/CLUSTER/MACHINE...", shell_complete=complete_machine
)


@machines.command()
@_IDS
@click.option("--reason", help="The reason, shown to other users.")
@click.pass_obj
def cordon(session: Session, machine_ids: tuple[str, ...], reason: str | None) -> None:
    """Stop placing new work on machines; running tasks continue."""
    _set(session, machine_ids, "cordon", reason)


@machines.command()
@_IDS
@click.pass_obj
def uncordon(session: Session, machine_ids: tuple[str, ...]) -> None:
    """Allow new work on cordoned machines again."""
    _set(session, machine_ids, "uncordon")


@machines.command()
@_IDS
@click.pass_obj
def drain(session: Session, machine_ids: tuple[str, ...]) -> None:
    """Move all work off machines; workloads save a checkpoint first."""
    _set(session, machine_ids, "drain")


@machines.command()
@_IDS
@click.pass_obj
def undrain(session: Session, machine_ids: tuple[str, ...]) -> None:
    """Cancel the drain of machines."""
    _set(session, machine_ids, "undrain")


@machines.command("rm")
@_IDS
@click.pass_obj
def remove_machines(session: Session, machine_ids: tuple[str, ...]) -> None:
    """Remove machines that are drained or lost and on which no workload holds resources.

    If the agent of a removed machine starts again, the machine joins as a new one.
    """
    _remove(session, machine_ids, session.client.remove_machine)


@machines.command()
@click.argument("machine_id", metavar="REGION/CLUSTER/MACHINE", shell_complete=complete_machine)
@click.option("--key", help="Fingerprint of the new key. Default: the key that the machine presents now.")
@click.pass_obj
def trust(session: Session, machine_id: str, key: str | None) -> None:
    """Trust the new public key that a machine presents. From then on, secrets are encrypted to this key."""
    emit_list(session, [session.client.trust_machine(machine_id, key)], _MACHINE_COLUMNS)
