"""`mizzen tetris plan`, `runs`, `report`, `moves`, `pause`, `resume`: the nightly placement of an installation."""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from mizzen.cli.exits import Exit
from mizzen.cli.printer import Column, emit_list, emit_one
from mizzen_client.cli import formats
from mizzen_client.cli.session import Session, finish, say

if TYPE_CHECKING:
    from mizzen_client.client import Client
    from mizzen_client.views import PlacementRunReport

_MOVES_SHOWN = 20
_UNPLACED_SHOWN = 10
_ASK_EVERY_S = 0.5
_SAY_EVERY_S = 5.0
_STATES = ("done", "copying", "waiting", "left")


def _moves_said(placement_run: Mapping[str, Any]) -> str:
    counts = placement_run["moves"]
    return ", ".join(f"{counts[state]:,} {state}" for state in _STATES if state in counts)


_PLACEMENT_RUN_COLUMNS = (
    Column("ID", lambda n: n["id"]),
    Column("STATE", lambda n: n["state"]),
    Column("STARTED", lambda n: formats.ago(n["started_at"]), drop=1),
    Column("TOOK", lambda n: formats.between(n["started_at"], n["ended_at"]), drop=2),
    Column("MOVED", lambda n: formats.size(n["moved_bytes"]), right=True),
    Column("MOVES", lambda n: n["problem"] or ("dry run: " if n["dry_run"] else "") + _moves_said(n), flexible=True),
)
_MOVE_COLUMNS = (
    Column("NUMBER", lambda m: str(m["number"]), right=True),
    Column("KIND", lambda m: m["kind"]),
    Column("TABLE", lambda m: m["table"]),
    Column("FROM", lambda m: m["source_region"], drop=1),
    Column("TO", lambda m: m["target_region"]),
    Column("SIZE", lambda m: formats.size(m["size_bytes"]), right=True),
    Column("STATE", lambda m: m["state"]),
    Column("WHY", lambda m: m["left_because"] or _why(m["why"]), flexible=True),
)


def _why(why: Mapping[str, Any]) -> str:
    if "total" in why:
        changes = {"gain": "gain_region", "lose": "lose_region", "change": "change_region"}
        counts = [f"{len(why[key])} {word} a region" for word, key in changes.items() if why.get(key)]
        return f"total {why['total']:+.4g}" + (f"; jobs: {', '.join(counts)}" if counts else "")
    return str(why.get("reason", "")).replace("_", " ") + (f": {why['job']}" if "job" in why else "")


@click.command()
@click.option("--dry-run", is_flag=True, help="Only plan and report; move nothing.")
@click.pass_obj
def plan(session: Session, dry_run: bool) -> None:
    """Start a placement run now: plan homes and replicas, show the plan, and start the moves (operators)."""
    begun = session.client.begin_placement_run(dry_run=dry_run)
    began_s = said_s = time.monotonic()
    while (placement_run := session.client.placement_run(begun["id"]))["state"] == "planning":
        time.sleep(_ASK_EVERY_S)
        if time.monotonic() - said_s >= _SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"{placement_run['id']}: planning for {said_s - began_s:.0f} s")
    emit_one(session, placement_run, lambda: "\n".join(_page(session.client, placement_run)))
    if placement_run["state"] == "failed":
        finish(Exit.CONFLICT)


@click.command("runs")
@click.option("--limit", type=click.IntRange(1, 500), default=30, show_default=True)
@click.pass_obj
def placement_runs(session: Session, limit: int) -> None:
    """List placement runs, the newest first, with the numbers of their moves."""
    answer = session.client.placement_runs(limit)
    emit_list(session, answer["items"], _PLACEMENT_RUN_COLUMNS)
    if answer["paused"] is not None:
        paused = answer["paused"]
        note = f": {paused['note']}" if paused["note"] else ""
        say(f"moves have been paused since {formats.clock(paused['since'])} by {paused['by']}{note}")


@click.command()
@click.argument("placement_run", metavar="RUN", required=False)
@click.pass_obj
def report(session: Session, placement_run: str | None) -> None:
    """Show the plan of RUN (default: the newest): regions before and after, moves by gain, jobs without a region."""
    found = session.client.placement_run(placement_run or _newest(session))
    emit_one(session, found, lambda: "\n".join(_page(session.client, found)))


@click.command()
@click.argument("placement_run", metavar="RUN", required=False)
@click.option("--state", type=click.Choice(["waiting", "copying", "done", "left"]), help="Only moves in this state.")
@click.pass_obj
def moves(session: Session, placement_run: str | None, state: str | None) -> None:
    """List the moves of RUN (default: the newest) in the order of their start, and why some were not made."""
    listed = list(session.client.moves(placement_run or _newest(session), state))
    emit_list(session, listed, _MOVE_COLUMNS, name=lambda m: str(m["table"]))


@click.command()
@click.option("--note", default="", help="Reason for the pause, shown to other operators.")
@click.pass_obj
def pause(session: Session, note: str) -> None:
    """Pause nightly moves, including moves in progress; copied data is kept (operators)."""
    paused = session.client.pause_moves(note)
    emit_one(session, paused, lambda: f"moves paused since {formats.clock(paused['since'])}", name="paused")


@click.command()
@click.pass_obj
def resume(session: Session) -> None:
    """Resume nightly moves where they stopped (operators)."""
    session.client.resume_moves()
    emit_one(session, {"paused": None}, lambda: "resumed", name="resumed")


COMMANDS = (plan, placement_runs, report, moves, pause, resume)


def _newest(session: Session) -> str:
    items = session.client.placement_runs(1)["items"]
    if not items:
        say("there are no placement runs yet; `mizzen tetris plan --dry-run` plans one")
        finish(Exit.NOT_FOUND)
    return str(items[0]["id"])


def _page(client: "Client", placement_run: "PlacementRunReport") -> Iterator[str]:
    """Yields the lines of a placement run's report: its state, regions before and after, moves, and unplaced jobs."""
    from tetris.report import Summary, lines, violation_lines

    yield f"{placement_run['id']}: {placement_run['state']}" + (", a dry run" if placement_run["dry_run"] else "")
    if placement_run["problem"] is not None:
        yield f"error: {placement_run['problem']}"
    if placement_run["report"] is None:
        return
    summary = Summary.of(placement_run["report"]["summary"])
    yield ""
    yield from lines(summary)
    yield from violation_lines(summary)
    yield ""
    yield f"moves: {_moves_said(placement_run) or 'none'}"
    total = sum(placement_run["moves"].values())
    for move in islice(client.moves(placement_run["id"], limit=_MOVES_SHOWN), _MOVES_SHOWN):
        yield f"  {_move_said(move, left=not placement_run['dry_run'])}"
    if total > _MOVES_SHOWN:
        yield f"  and {total - _MOVES_SHOWN:,} more: mizzen tetris moves {placement_run['id']}"
    unplaced, count = placement_run["report"]["unplaced"], placement_run["report"]["unplaced_jobs"]
    if count:
        yield f"{count:,} {'job finds' if count == 1 else 'jobs find'} no region with their data and hardware:"
    for job in unplaced[:_UNPLACED_SHOWN]:
        short = f", {formats.size(job['short_bytes'])} short" if job["short_bytes"] else ""
        yield f"  {job['job']} (priority {job['level']}): {job['reason'].replace('_', ' ')}{short}"
    if len(unplaced) > _UNPLACED_SHOWN:
        yield f"  and {count - _UNPLACED_SHOWN:,} more; see report.json in {placement_run['artifact_url']}"


def _move_said(move: Mapping[str, Any], *, left: bool) -> str:
    way = move["target_region"] if move["kind"] == "drop" else f"{move['source_region']} -> {move['target_region']}"
    said = f"{move['kind']} {move['table']}: {way}, {formats.size(move['size_bytes'])}"
    if why := _why(move["why"]):
        said += f", {why}"
    return said + (f" (left: {move['left_because']})" if left and move["state"] == "left" else "")
