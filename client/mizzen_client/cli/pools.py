"""Commands about pools and about the machines that are requested from providers for them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from mizzen.cli.printer import Column, emit_list, emit_one, table
from mizzen_client.cli import formats
from mizzen_client.cli.numbers import Number
from mizzen_client.cli.session import (
    Commands,
    Session,
    complete_pool,
    complete_pool_name,
    complete_region,
    duration,
    finish,
    labels,
    split_place,
)

_KINDS = click.Choice(["reserved", "on_demand", "spot", "voluntary"])


def _pool_name(pool: Mapping[str, Any]) -> str:
    return f"{pool['region']}/{pool['name']}"


def _takes(pool: Mapping[str, Any]) -> str:
    parts = [",".join(pool[field]) for field in ("providers", "zones", "kinds", "machine_types") if pool[field]]
    if pool["max_usd_per_h"] is not None:
        parts.append(f"at most {formats.usd(pool['max_usd_per_h'])}/h")
    return "; ".join(parts) or "any offer"


def _size(pool: Mapping[str, Any]) -> str:
    grows = "" if pool["max_size"] is None else f" to {pool['max_size']}"
    return f"{pool['size']}{grows}" + (f", {pool['buffer']} idle" if pool["buffer"] else "")


def _phases(pool: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {phase}" for phase, count in sorted(pool["instances"].items())) or "none"


_POOL_COLUMNS = (
    Column("POOL", _pool_name),
    Column("SIZE", _size, right=True),
    Column("MACHINES", _phases),
    Column("USD/H", lambda p: formats.usd(p["usd_per_h"]), drop=2, right=True),
    Column("TENANTS", lambda p: ", ".join(p["tenants"]) or "any", drop=4),
    Column("OFFERS", _takes, drop=3, flexible=True),
    Column("REASON", lambda p: formats.reason(p["reason"]), drop=1, flexible=True),
)
_INSTANCE_COLUMNS = (
    Column("ID", lambda i: i["id"]),
    Column("POOL", lambda i: f"{i['region']}/{i['pool']}"),
    Column("PHASE", lambda i: i["phase"]),
    Column("TYPE", lambda i: i["machine_type"]),
    Column("ZONE", lambda i: i["zone"], drop=3),
    Column("CAPACITY", lambda i: i["kind"].replace("_", " "), drop=2),
    Column("AGE", lambda i: formats.between(i["requested_at"], i["gone_at"]), drop=4, right=True),
    Column("COST", lambda i: formats.usd(i["usd"]), drop=5, right=True),
    Column("PROVIDER", lambda i: i["provider"], wide=True),
    Column("PROVIDER ID", lambda i: i["native_id"], wide=True),
    Column("MACHINE", lambda i: i["machine"], wide=True),
    Column("WORKLOADS", lambda i: ", ".join(i["wanted_by"]), drop=6),
    Column("REASON", lambda i: formats.reason(i["reason"]), drop=1, flexible=True),
)


def _numbers(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """Option callback: reads repeated `type=number` values into a mapping."""
    out = {}
    for name, number in labels(context, parameter, values).items():
        if not number.isdecimal():
            raise click.BadParameter(f"{name}={number}: must be a whole number of GPUs", context, parameter)
        out[name] = int(number)
    return out


@click.group(cls=Commands)
def pools() -> None:
    """List pools; create, resize and remove them."""


@pools.command("list")
@click.option("--region", shell_complete=complete_region, help="List only the pools of this region.")
@click.pass_obj
def list_pools(session: Session, region: str | None) -> None:
    """List pools."""
    emit_list(session, session.client.pools(region), _POOL_COLUMNS, name=_pool_name)


_POOL = click.argument("pool", metavar="REGION/POOL", shell_complete=complete_pool)


@pools.command("set")
@_POOL
@click.option("--size", type=click.IntRange(min=0), help="Number of machines; with --max-size, the minimum.")
@click.option(
    "--max-size", type=click.IntRange(min=0), help="Maximum number of machines; the pool grows for waiting workloads."
)
@click.option("--fixed", is_flag=True, help="Keep --size machines: no growth, no buffer.")
@click.option(
    "--idle",
    metavar="DURATION",
    callback=duration(above_zero=False),
    help="End machines above --size after this idle time, such as 10m.",
)
@click.option("--buffer", type=click.IntRange(min=0), help="Number of idle machines to keep ready, if the pool grows.")
@click.option("--provider", "providers", multiple=True, help="Accept only offers of this provider; repeatable.")
@click.option("--zone", "zones", multiple=True, help="Accept only offers in this zone; repeatable.")
@click.option(
    "--kind", "kinds", multiple=True, type=_KINDS, help="Accept only offers of this capacity kind; repeatable."
)
@click.option("--machine-type", "machine_types", multiple=True, help="Accept only this machine type; repeatable.")
@click.option("--any", "any_", is_flag=True, help="Accept any offer, except for limits given in this command.")
@click.option("--max-usd-per-h", type=Number(min=0), help="Highest price of a machine, in US dollars per hour.")
@click.option("--tenant", "tenants", multiple=True, help="Only workloads of this tenant use its machines; repeatable.")
@click.option("--any-tenant", is_flag=True, help="Workloads of all tenants use its machines.")
@click.option(
    "--gpus",
    metavar="TYPE=NUMBER",
    multiple=True,
    callback=_numbers,
    help="Intended GPUs, which plans keep; 0 removes; repeatable.",
)
@click.option("--failure-buffer", type=Number(0, 1), help="Plans: share of --gpus to have in addition.")
@click.option(
    "--survives-loss/--no-survives-loss", default=None, help="Plans: keep --gpus without any one fault domain."
)
@click.option(
    "--max-share",
    type=Number(0, 1, min_open=True),
    help="Plans: highest share that counts of one fault domain.",
)
@click.pass_obj
def set_pool(session: Session, /, pool: str, any_: bool, fixed: bool, idle: float | None, **options: Any) -> None:
    """Create a pool, or change the given settings of a pool (operators).

    Missing machines are launched; surplus machines are drained and ended. With --max-size, the pool launches machines
    for workloads that fit in no region.
    """
    region, name = split_place(pool, "REGION/POOL")
    lists = ("providers", "zones", "kinds", "machine_types")
    settings: dict[str, Any] = {field: list(options[field]) for field in lists if options[field] or any_}
    if any_:
        settings["max_usd_per_h"] = None
    if options["tenants"] or options["any_tenant"]:
        settings["tenants"] = list(options["tenants"])
    if fixed:
        settings |= {"max_size": None, "buffer": 0}
    if idle is not None:
        settings["idle_s"] = idle
    if options["gpus"]:
        settings["gpus"] = options["gpus"]
    numbers = ("size", "max_size", "buffer", "max_usd_per_h", "failure_buffer", "survives_loss", "max_share")
    settings |= {field: options[field] for field in numbers if options[field] is not None}
    if not settings:
        raise click.UsageError("nothing to set: give --size, --max-size, or another option")
    emit_list(session, [session.client.set_pool(region, name, **settings)], _POOL_COLUMNS, name=_pool_name)


def _outcome(plan: Mapping[str, Any]) -> str:
    lacking = [pool for pool in plan["pools"] if pool["short"]]
    names = ", ".join(f"{pool['pool']} lacks {pool['short']} {pool['gpu_type']}" for pool in lacking)
    moves = f"moves: {plan['move_count']}, of machines in use: {plan['busy_move_count']}"
    return f"made {formats.ago(plan['made_at'])}: {moves}; {names or 'no pool lacks GPUs'}"


_PLAN_COLUMNS = (
    Column("POOL", lambda p: p["pool"]),
    Column("GPU TYPE", lambda p: p["gpu_type"]),
    Column("SIZE", lambda p: p["size"], right=True),
    Column("NEEDED", lambda p: p["needed"], right=True),
    Column("NOW", lambda p: p["now"], right=True),
    Column("PLANNED", lambda p: p["planned"], right=True),
    Column("AFTER LOSS", lambda p: p["after_loss"], right=True),
    Column("LACKING", lambda p: p["short"] or None, right=True),
)
_MOVE_COLUMNS = (
    Column("MACHINE", lambda m: m["machine"]),
    Column("FROM", lambda m: m["source"]),
    Column("TO", lambda m: m["target"]),
    Column("IN USE", lambda m: "yes" if m["busy"] else None),
)


@pools.command("plan")
@click.argument("region", shell_complete=complete_region)
@click.option("--dry-run", is_flag=True, help="Has no effect: this command never moves machines.")
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write a picture of the plan to a file.",
)
@click.pass_obj
def plan_pools(session: Session, region: str, dry_run: bool, svg: Path | None) -> None:  # noqa: ARG001
    """Show the newest plan of which machines of a region belong to which pool (operators).

    Plans are made every 30 minutes, and after a change of sizes or machines. mizzen carries them out, unless
    `capacity.move_machines` is false.
    """
    plan = session.client.pool_plan(region)
    if svg is not None:
        svg.write_text(plan["svg"], encoding="utf-8")

    def page() -> str:
        pools, moves = table(plan["pools"], _PLAN_COLUMNS, None), table(plan["moves"], _MOVE_COLUMNS, None)
        return "\n".join([_outcome(plan), "", *pools, *(["", *moves] if plan["moves"] else [])])

    emit_one(session, plan, page, name=region)


@pools.command("rm")
@_POOL
@click.pass_obj
def remove_pool(session: Session, pool: str) -> None:
    """Remove a pool; its machines are drained and ended (operators)."""
    session.client.remove_pool(*split_place(pool, "REGION/POOL"))
    emit_one(session, {"removed": pool}, partial("removed {}".format, pool), name=pool)


@click.group(cls=Commands)
def instances() -> None:
    """List the machines requested from providers; end them."""


@instances.command("list")
@click.option("--region", shell_complete=complete_region, help="List only the machines of this region.")
@click.option("--pool", shell_complete=complete_pool_name, help="List only the machines of pools with this name.")
@click.option("--gone", is_flag=True, help="Also list machines that are gone.")
@click.pass_obj
def list_instances(session: Session, region: str | None, pool: str | None, gone: bool) -> None:
    """List the machines requested from providers, newest first."""
    emit_list(session, list(session.client.instances(region, pool, gone=gone)), _INSTANCE_COLUMNS)


@instances.command("end")
@click.argument("instance_ids", nargs=-1, required=True, metavar="INSTANCE...")
@click.pass_obj
def end_instances(session: Session, instance_ids: tuple[str, ...]) -> None:
    """Drain machines, then end them at their providers (operators).

    A pool that then has fewer machines than its size launches replacements.
    """
    done, code = session.each_name(instance_ids, session.client.end_instance)
    if done:
        emit_list(session, done, _INSTANCE_COLUMNS)
    finish(code)
