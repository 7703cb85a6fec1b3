"""Commands about services."""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mizzen.cli.printer import Column, emit_list, emit_one, table
from mizzen_client.cli import formats
from mizzen_client.cli.exits import Exit, exit_of
from mizzen_client.cli.log_commands import print_logs
from mizzen_client.cli.pages import notification_lines, why_page
from mizzen_client.cli.session import (
    Commands,
    Session,
    complain,
    complete_service,
    complete_tenant,
    finish,
    interrupted,
    say,
)
from mizzen_client.errors import ClientError, NotFound, UnknownReference

if TYPE_CHECKING:
    from mizzen_client.archives import PackedFolder
    from mizzen_client.documents import Document
    from mizzen_client.views import ServiceReplica

_LOOK_S = 1.0
_SHOWN = 3
"""Maximum number of waiting replicas whose reasons `--wait` prints."""
_GIVEN_UP = frozenset({"update_given_up", "canary_failed"})
"""The codes of notes that say that an update was abandoned."""
_NEWEST = 20
"""Of the replicas that have ended, `logs --all` prints those among this number of newest replicas."""
_SERVICE = click.argument("service", shell_complete=complete_service)
_FILE = click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
_WAIT = click.option("--wait", "wait_", is_flag=True, help="Wait until the service is ready.")


def _ready(service: Mapping[str, Any]) -> str:
    return f"{sum(service['ready'].values())}/{service['target']}"


def _where(service: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {place.replace('_', '-')}" for place, count in service["ready"].items()) or "none"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"


def _cost(service: Mapping[str, Any]) -> str | None:
    """Return the cost, and what it is relative to on-demand machines."""
    whole = service["usd_on_demand"]
    ratio = f" ({100 * service['usd'] / whole:.0f} % of on-demand)" if whole else ""
    return f"{formats.usd(service['usd'])}{ratio}"


def _rate(service: Mapping[str, Any]) -> str | None:
    return None if service["requests"] is None else f"{service['requests']['per_s']:.1f}"


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


_SERVICE_COLUMNS = (
    Column("NAME", lambda s: s["name"]),
    Column("TENANT", lambda s: s["tenant"], drop=3),
    Column("STATE", lambda s: s["state"].replace("_", " ")),
    Column("READY", _ready, right=True),
    Column("VERSION", lambda s: s["version"], drop=6, right=True),
    Column("AVAILABLE", lambda s: _percent(s["availability"]), drop=2, right=True),
    Column("REQUESTS/S", _rate, drop=4, right=True),
    Column("COST", _cost, drop=5, right=True),
    Column("AGE", lambda s: formats.between(s["created_at"], s["ended_at"]), drop=7, right=True),
    Column("REPLICAS", _where, wide=True),
    Column("ID", lambda s: s["id"], wide=True),
    Column("NOTES", lambda s: "; ".join(note["sentence"] for note in s["notes"]), drop=1, flexible=True),
)


def _address(replica: Mapping[str, Any]) -> str | None:
    return None if replica["address"] is None else f"{replica['address']}:{replica['port']}"


def _waits(replica: Mapping[str, Any]) -> bool:
    is_quiet = replica["phase"] == "running" and not replica["probe_error"]
    return replica["stage"] in ("starting", "unready") and not is_quiet and bool(_state_reason(replica))


def _state_reason(replica: Mapping[str, Any]) -> str:
    parts = [replica["cause"], replica["probe_error"] and f"probe: {replica['probe_error']}"]
    if replica["stage"] not in ("ready", "draining"):
        parts.append(formats.reason(replica["reason"]))
    return "; ".join(part for part in parts if part)


_REPLICA_COLUMNS = (
    Column("REPLICA", lambda r: r["number"], right=True),
    Column("STAGE", lambda r: r["stage"]),
    Column("KIND", lambda r: r["kind"].replace("_", "-")),
    Column("ZONE", lambda r: r["zone"] or "shared", drop=2),
    Column("VERSION", lambda r: r["version"], drop=4, right=True),
    Column("ADDRESS", _address, drop=5),
    Column("AGE", lambda r: formats.between(r["launched_at"], r["ended_at"]), drop=3, right=True),
    Column("WORKLOAD", lambda r: r["workload"]),
    Column("WHY", _state_reason, drop=1, flexible=True),
)


@click.group(cls=Commands)
def serve() -> None:
    """Create, update, show and end services."""


@serve.command("up")
@_FILE
@click.option("--name", help="Use this name instead of the document's.")
@click.option("--tenant", shell_complete=complete_tenant, help="Use this tenant instead of the document's.")
@_WAIT
@click.pass_obj
def up(session: Session, file: str, name: str | None, tenant: str | None, wait_: bool) -> None:
    """Create a service from a document: mizzen's, or a service file of SkyPilot.

    FILE is YAML or JSON; `-` is stdin. If it has no name, the service gets the name of the file.
    """
    document, workdir = _read(file)
    body = {**document.body, **{key: value for key, value in (("name", name), ("tenant", tenant)) if value is not None}}
    made = _send(document, lambda: session.client.create_service(body, workdir, name=_stem(file)))
    _made(session, made, wait_)


@serve.command("update")
@_SERVICE
@_FILE
@click.option("--blue-green", is_flag=True, help="Switch to the new version once all its replicas are ready.")
@_WAIT
@click.pass_obj
def update(session: Session, service: str, file: str, blue_green: bool, wait_: bool) -> None:
    """Replace the document of a service.

    By default, replicas are replaced a few at a time (`max_surge`): each new one becomes ready before an older one is
    drained. An update whose replicas fail is abandoned, and the older version continues.
    """
    document, workdir = _read(file)
    made = _send(
        document, lambda: session.client.update_service(service, document.body, workdir, blue_green=blue_green)
    )
    _made(session, made, wait_)


@serve.command("status")
@click.argument("service", required=False, shell_complete=complete_service)
@click.option("--tenant", shell_complete=complete_tenant, help="List only the services of this tenant.")
@click.option("--ended", is_flag=True, help="Also list services and replicas that have ended.")
@click.pass_obj
def status(session: Session, service: str | None, tenant: str | None, ended: bool) -> None:
    """List services, or show one with its replicas."""
    if service is None:
        emit_list(
            session, session.client.services(tenant, ended=ended), _SERVICE_COLUMNS, name=lambda s: str(s["name"])
        )
        return
    body: dict[str, Any] = {**session.client.service(service)}
    if ended:
        body["replicas"] = list(session.client.service_replicas(service))
    emit_one(session, body, lambda: _page(body), name=str(body["name"]))


@serve.command("logs")
@_SERVICE
@click.argument("replica", required=False, type=click.IntRange(0, 10**9 - 2))
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help=f"Print all replicas that have not ended, and those that have ended among the {_NEWEST} newest ones.",
)
@click.option("-f", "--follow", is_flag=True, help="Continue until the replica has ended.")
@click.option("-n", "--tail", type=click.IntRange(min=0), help="Print only the last lines of each task.")
@click.pass_obj
def logs(session: Session, service: str, replica: int | None, all_: bool, follow: bool, tail: int | None) -> None:
    """Print the output of a replica. Default: the oldest ready replica, or else the newest one.

    With --all, each line starts with `REPLICA| `.
    """
    if all_ and (follow or replica is not None):
        raise click.UsageError(f"--all cannot be used with {'--follow' if follow else 'a replica'}")
    chosen = _all(session, service) if all_ else [_one(session, service, replica)]
    try:
        for one in chosen:
            say(f"replica {one['number']} ({one['stage']}), workload {one['workload']}")
            prefix = f"{one['number']}| " if all_ else ""
            try:
                print_logs(session, one["workload"], prefix, follow=follow, tail=tail)
            except NotFound:
                if not all_:
                    raise
                say(f"replica {one['number']} has no logs: the record of its workload is deleted")
    except KeyboardInterrupt:
        again = f"`mizzen serve logs -f {service} {chosen[0]['number']}` follows it again"
        interrupted("only this listing has stopped" if all_ else f"the replica continues; {again}")


def _one(session: Session, service: str, number: int | None) -> "ServiceReplica":
    """Return a replica by its number; without one, the oldest ready replica or else the newest replica."""
    if number is not None:
        found = session.client.service_replica(service, number)
        missing = f"has no replica {number}"
    else:
        ready = [one for one in session.client.service(service)["replicas"] if one["stage"] == "ready"]
        found = next(iter(ready or session.client.service_replicas(service, 1)), None)
        missing = "has no replicas yet"
    if found is None:
        raise UnknownReference(f"service {service} {missing}; `mizzen serve status {service}` lists them")
    return found


def _all(session: Session, service: str) -> "list[ServiceReplica]":
    """Return the replicas that have not ended, and the newest ones, by number."""
    shown = [*session.client.service(service)["replicas"], *session.client.service_replicas(service, _NEWEST)]
    by_number = {one["number"]: one for one in shown}
    return [by_number[number] for number in sorted(by_number)]


@serve.command("down")
@click.argument("services", nargs=-1, required=True, shell_complete=complete_service)
@click.option("--wait", "wait_", is_flag=True, help="Wait until all replicas and their machines have ended.")
@click.pass_obj
def down(session: Session, services: tuple[str, ...], wait_: bool) -> None:
    """End services with all their replicas and machines. Requests in progress are cut."""
    done, code = session.each_name(services, session.client.end_service)
    if wait_:
        done = [_until(session, one["id"], "ended") for one in done]
    if done:
        emit_list(session, done, _SERVICE_COLUMNS, name=lambda s: str(s["name"]))
    finish(code)


# ----------------------------------------------------------------------------------------------------------- documents


def _read(file: str) -> "tuple[Document, Path | PackedFolder | None]":
    """Return a document as the API reads it, and its working directory with the local files that it names."""
    from mizzen_client.cli.submit import read_files
    from mizzen_client.service_files import with_files

    documents = read_files((file,))
    if len(documents) > 1:
        raise click.UsageError(f"{file} has {len(documents)} documents; a service is one document")
    try:
        body, workdir, notes = with_files(documents[0])
    except ClientError as error:
        complain(error)
        finish(Exit.USAGE)
    for note in notes:
        say(note)
    return replace(documents[0], body=body), workdir


def _stem(file: str) -> str | None:
    """Return a name for a service that is made from the name of its file; None: there is none."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(file).stem.lower()).strip("-")[:63].rstrip("-")
    return name or None


def _send(document: "Document", send: Any) -> Any:
    from mizzen_client.cli.submit import complain_of

    try:
        return send()
    except ClientError as error:
        complain_of(document, error)
        finish(exit_of(error))


def _made(session: Session, made: Mapping[str, Any], wait_: bool) -> None:
    for note in made["document_notes"]:
        say(note)
    shown = made
    if wait_:
        say(f"service {made['name']}, version {made['version']}; waiting until it is ready")
        shown = _until(session, made["id"], "ready")
    emit_list(session, [shown], _SERVICE_COLUMNS, name=lambda s: str(s["name"]))
    if not wait_:
        say(f"`mizzen serve status {made['name']}` shows its replicas")


def _until(session: Session, id_: str, state: str) -> Any:
    """Wait until a service is in `state`, and print changes meanwhile. Return the service.

    A service that is updated is ready once all ready replicas have the newest version. The command fails if the update
    is abandoned, or if the service ends.
    """
    told = None
    try:
        while True:
            now = session.client.service(id_)
            waits = [f"replica {one['number']}: {_state_reason(one)}" for one in now["replicas"] if _waits(one)]
            shown = "; ".join([note["sentence"] for note in now["notes"]] + waits[:_SHOWN])
            line = f"{now['name']}: {now['state']}, {_ready(now)} ready" + (f": {shown}" if shown else "")
            if line != told:
                say(line)
                told = line
            is_new = set(now["versions"]) == {str(now["version"])} or now["target"] == 0
            if state == "ready" and now["state"] == "scaled_to_zero":
                return now
            if now["state"] == state and (state != "ready" or is_new):
                return now
            if state == "ready" and (
                now["state"] in ("stopping", "ended") or any(n["code"] in _GIVEN_UP for n in now["notes"])
            ):
                finish(Exit.WORKLOAD_FAILED)
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        goes_on = "replicas continue to end" if state == "ended" else "the service continues"
        interrupted(f"{goes_on}; `mizzen serve status {id_}` shows it")
    except NotFound:
        finish(Exit.WORKLOAD_FAILED)


# ---------------------------------------------------------------------------------------------------------------- page


def _page(service: Mapping[str, Any]) -> str:
    requests = service["requests"]
    served = "no balancer reports"
    if requests is not None:
        served = (
            f"{requests['per_s']:.1f}/s, P50 {_seconds(requests['p50_s'])}, P99 {_seconds(requests['p99_s'])},"
            f" {requests['failed']} failed and {requests['cut']} cut in the last minute"
        )
    versions, available = service["versions"], _percent(service["availability"]) or "?"
    rows = [
        ("service", f"{service['name']} of {service['tenant']} ({service['id']})"),
        ("state", f"{service['state'].replace('_', ' ')}, {_ready(service)} replicas ready: {_where(service)}"),
        ("version", f"{service['version']}" + (f"; ready: {formats.pairs(versions)}" if len(versions) > 1 else "")),
        ("policy", f"{service['policy']}" + (f", zones {', '.join(service['zones'])}" if service["zones"] else "")),
        ("availability", ", ".join((available, formats.plural(service["preemptions"], "preemption")))),
        ("cost", _cost(service)),
        ("requests", served),
        *(("note", note["sentence"]) for note in service["notes"]),
    ]  # fmt: skip
    lines = [f"{name:<13} {value}" for name, value in rows]
    if service["replicas"]:
        lines += ["", *table(service["replicas"], _REPLICA_COLUMNS, None)]
    return "\n".join([*lines, *notification_lines(service)])


def why_service(session: Session, name: str) -> bool:
    """Explain why replicas of a service do not serve, as `mizzen why` does; return whether there is such a service."""
    try:
        service = session.client.service(name)
    except NotFound:
        return False
    waiting = [one for one in service["replicas"] if one["stage"] in ("starting", "unready", "leaving")]
    found = [(one, session.client.why(one["workload"])) for one in waiting if one["phase"] is not None]
    body = {
        "service": service["name"],
        "state": service["state"],
        "notes": service["notes"],
        "replicas": [{"number": one["number"], "stage": one["stage"], "why": why} for one, why in found],
    }

    def page() -> str:
        lines = [f"{service['name']}: {service['state'].replace('_', ' ')}, {_ready(service)} replicas ready"]
        lines += [f"  {note['sentence']}" for note in service["notes"]]
        for one, why in found:
            probe = [f"  probe: {one['probe_error']}"] if one["probe_error"] else []
            lines += [f"replica {one['number']}: {why_page(why)}", *probe]
        return "\n".join(lines)

    codes = [reason["code"] for _, why in found for reason in why["reasons"]]
    emit_one(session, body, page, name="\n".join([note["code"] for note in service["notes"]] + codes))
    return True
