"""The command `top`: the fleet and the caller's workloads on one screen."""

import shutil
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from mizzen.cli.printer import emit_one, no_colour, table
from mizzen_client.cli import formats
from mizzen_client.cli.fleet import REGION_COLUMNS
from mizzen_client.cli.screen import fitted, interval_option, is_live, watch_screen
from mizzen_client.cli.session import LIVE_PHASES, OutputCommand, Session, complete_tenant
from mizzen_client.cli.workload_commands import phase_of, workload_lines

_MOST = 500
"""Maximum number of workloads that are read."""
_FLEET_SHARE = 3
"""The list of regions takes at most this fraction (one n-th) of the screen."""


@click.command(cls=OutputCommand)
@click.option("--tenant", shell_complete=complete_tenant, help="Show only the workloads of this tenant.")
@interval_option
@click.pass_obj
def top(session: Session, tenant: str | None, interval_s: float) -> None:
    """Show the fleet and your workloads, updated continuously.

    It shows the workloads that have not ended, running ones first. Ctrl-C ends it. If stdout is not a terminal, or
    with -o json or yaml, it prints once.
    """

    def read() -> dict[str, Any]:
        client = session.client
        live = list(client.workloads(tenant=tenant, phases=("live",), limit=_MOST))
        live.sort(key=_place)
        return {"regions": client.regions(), "queue": client.queue(1), "workloads": live}

    if is_live(session):
        watch_screen(session, read, lambda found, width: _lines(session, found, width), interval_s)
        return
    body = read()
    names = "\n".join(workload["id"] for workload in body["workloads"])
    emit_one(session, body, lambda: "\n".join(_lines(session, body, None)), name=names)


def _place(workload: Mapping[str, Any]) -> tuple[int, str]:
    return LIVE_PHASES.index(_state(workload)) if _state(workload) in LIVE_PHASES else len(LIVE_PHASES), workload["id"]


def _state(workload: Mapping[str, Any]) -> str:
    """Return the phase without the counts of an array."""
    return phase_of(workload).partition(" ")[0]


def _lines(session: Session, found: Mapping[str, Any], width: int | None) -> list[str]:
    """Return the screen. `width` None: as wide and high as needed."""
    regions = table(found["regions"], REGION_COLUMNS[:3], width, colour=not no_colour()) if found["regions"] else []
    if width is not None:
        regions = fitted(regions, max(2, shutil.get_terminal_size().lines // _FLEET_SHARE - 2))
    return [*_summary(found, width), "", *regions, "", *workload_lines(session, found["workloads"], width)]


def _summary(found: Mapping[str, Any], width: int | None) -> list[str]:
    machines, gpus = Counter[str](), Counter[str]()
    for region in found["regions"]:
        machines.update(region["machines"])
        for kind, slots in region["gpus"].items():
            gpus.update({f"{kind} held": slots["held"], f"{kind} total": slots["total"]})
    kinds = sorted({name.partition(" ")[0] for name in gpus})
    used = ", ".join(f"{kind} {gpus[f'{kind} held']}/{gpus[f'{kind} total']}" for kind in kinds)
    others = "".join(f", {machines[state]} {state}" for state in ("joining", "lost", "cordoned") if machines[state])
    states = Counter(map(_state, found["workloads"]))
    work = ", ".join(f"{states[state]} {state}" for state in LIVE_PHASES if states[state]) or "none live"
    queue = found["queue"]
    scanned = f", last scan {formats.ago(queue['scanned_at'])}" if queue["scanned_at"] else ""
    ready = f"{formats.plural(len(found['regions']), 'region')}, {machines['ready']} machines ready{others}"
    lines = [
        f"fleet  {ready}; GPUs held: {used or 'none'}",
        f"work   {work}; {queue['total']} in the queue{scanned}",
    ]
    return [line[:width] for line in lines]
