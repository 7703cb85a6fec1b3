"""Commands about tenants, their secrets, API keys and the audit log."""

import math
from collections.abc import Mapping
from typing import Any

import click

from mizzen.cli.printer import Column, emit_list, emit_one, name_of
from mizzen_client.cli import formats
from mizzen_client.cli.session import (
    Commands,
    OutputCommand,
    Session,
    complete_machine,
    complete_tenant,
    duration,
    limit_option,
    say,
    stdin_text,
)
from mizzen_client.errors import NotFound


def _gpus(tenant: Mapping[str, Any]) -> str:
    used, quota = tenant["used"]["gpus"], tenant["quota"]["gpus"]
    return ", ".join(f"{kind} {used.get(kind, 0)}/{quota.get(kind, 0)}" for kind in sorted({*used, *quota}))


def _cpus(tenant: Mapping[str, Any]) -> str:
    limit = tenant["quota"]["cpus"]
    return f"{tenant['used']['cpus'] or 0:g}/{'no limit' if limit is None else f'{limit:g}'}"


def _expires(key: Mapping[str, Any]) -> str | None:
    at = key.get("expires_at")
    if at is None:
        return "never"
    return f"in {formats.until(at)}" if formats.is_ahead(at) else f"expired {formats.ago(at)}"


_COLUMNS = (
    Column("NAME", lambda t: t["name"]),
    Column("LEVEL", lambda t: t["level"], right=True),
    Column("GPUS USED/QUOTA", _gpus, flexible=True),
    Column("CPUS USED/QUOTA", _cpus, drop=1),
    Column("ISOLATION", lambda t: f"at least {t['isolation']}" if t["isolation"] else "any", drop=2),
)
_KEY_COLUMNS = (
    Column("ID", lambda k: k["id"]),
    Column("ROLE", lambda k: k["role"]),
    Column("TENANT", lambda k: k["tenant"]),
    Column("MACHINE", lambda k: k.get("machine"), drop=2),
    Column("PERSON", lambda k: k.get("person"), drop=2, flexible=True),
    Column("LABEL", lambda k: k.get("label"), drop=2, flexible=True),
    Column("CREATED", lambda k: formats.ago(k.get("created_at")), drop=3),
    Column("EXPIRES", _expires, drop=1),
    Column("REVOKED", lambda k: formats.ago(k.get("revoked_at")), drop=1),
)
_AUDIT_COLUMNS = (
    Column("TIME", lambda a: formats.clock(a["at"])),
    Column("ACTOR", lambda a: a["actor"]),
    Column("TENANT", lambda a: a["tenant"], drop=1),
    Column("ACTION", lambda a: a["action"]),
    Column("TARGET", lambda a: a["target"], flexible=True),
    Column("DETAIL", lambda a: formats.pairs(a["detail"]), wide=True),
)


@click.group(cls=Commands)
def tenants() -> None:
    """List tenants; set their quotas and secrets."""


@tenants.command("list")
@click.pass_obj
def list_tenants(session: Session) -> None:
    """List tenants with their quotas and current use."""
    emit_list(session, session.client.tenants(), _COLUMNS, name=name_of)


def _quota(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    out = {}
    for value in values:
        kind, equals, number = value.partition("=")
        if not kind or not equals or not number.isdigit():
            raise click.BadParameter(f"{value!r} is not of the form TYPE=SLOTS, such as a100=16", context, parameter)
        out[kind] = int(number)
    return out


def _cpu_quota(context: click.Context, parameter: click.Parameter, value: str | None) -> float | str | None:
    if value is None or value == "none":
        return value
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise click.BadParameter(f"{value!r} is neither a number of cores nor `none`", context, parameter)
    return number


@tenants.command("set")
@click.argument("name", shell_complete=complete_tenant)
@click.option("--level", type=click.IntRange(1, 7), help="Priority level; 1 is the highest.")
@click.option("--gpus", multiple=True, callback=_quota, metavar="TYPE=SLOTS", help="Quota of a GPU type (repeatable).")
@click.option("--cpus", callback=_cpu_quota, metavar="CORES|none", help="Quota of CPUs; `none`: no limit.")
@click.option(
    "--isolation",
    type=click.Choice(["none", "user", "sandbox"]),
    help="The weakest isolation of tasks on machines that run its workloads; `none`: any.",
)
@click.pass_obj
def set_tenant(
    session: Session,
    name: str,
    level: int | None,
    gpus: dict[str, int],
    cpus: float | str | None,
    isolation: str | None,
) -> None:
    """Create a tenant, or change the given settings of a tenant."""
    try:
        known = session.client.tenant(name)
    except NotFound:
        if level is None:
            raise click.UsageError(f"{name} is a new tenant: it needs --level") from None
        limit = None if cpus is None or isinstance(cpus, str) else cpus
        tenant = session.client.set_tenant(name, level, gpus, limit, isolation)
    else:
        limit = known["quota"]["cpus"] if cpus is None else None if isinstance(cpus, str) else cpus
        quota = {**known["quota"]["gpus"], **gpus}
        level, isolation = level or known["level"], isolation or known["isolation"]
        tenant = session.client.set_tenant(name, level, quota, limit, isolation)
    emit_list(session, [tenant], _COLUMNS, name=name_of)
    _warn_of_unknown(session, gpus)


def _warn_of_unknown(session: Session, gpus: Mapping[str, int]) -> None:
    """Warn of quotas for GPU types that no machine has: such a type may be misspelt, or its machines may come later."""
    known = sorted({kind for region in session.client.regions() for kind in region["gpus"]})
    for kind in sorted(kind for kind, slots in gpus.items() if slots and kind not in known):
        fleet = f"the fleet has {', '.join(known)}" if known else "the fleet has no GPUs until a pool launches some"
        say(f"no machine has GPUs of type {kind!r}; {fleet}")


@tenants.command("rm")
@click.argument("name", shell_complete=complete_tenant)
@click.pass_obj
def remove_tenant(session: Session, name: str) -> None:
    """Remove a tenant."""
    session.client.remove_tenant(name)
    emit_one(session, {"removed": name}, lambda: name, name=name)


@tenants.group(cls=Commands)
def secrets() -> None:
    """List, set and remove a tenant's secrets; their values are never shown."""


@secrets.command("list")
@click.argument("tenant", shell_complete=complete_tenant)
@click.pass_obj
def list_secrets(session: Session, tenant: str) -> None:
    """List the names of a tenant's secrets."""
    items = [{"name": name} for name in session.client.secrets(tenant)]
    emit_list(session, items, (Column("NAME", name_of),), name=name_of)


@secrets.command("set")
@click.argument("tenant", shell_complete=complete_tenant)
@click.argument("name")
@click.pass_obj
def set_secret(session: Session, tenant: str, name: str) -> None:
    """Set a secret to the content of stdin (without the last line end), or to a value typed at a prompt."""
    session.client.set_secret(tenant, name, stdin_text("the secret", f"{tenant}/{name}"))
    emit_one(session, {"tenant": tenant, "set": name}, lambda: name, name=name)


@secrets.command("rm")
@click.argument("tenant", shell_complete=complete_tenant)
@click.argument("name")
@click.pass_obj
def remove_secret(session: Session, tenant: str, name: str) -> None:
    """Remove a secret."""
    session.client.remove_secret(tenant, name)
    emit_one(session, {"tenant": tenant, "removed": name}, lambda: name, name=name)


@click.group(cls=Commands)
def keys() -> None:
    """List, create and revoke API keys (operators)."""


@keys.command("list")
@click.pass_obj
def list_keys(session: Session) -> None:
    """List API keys without their secret values."""
    emit_list(session, session.client.keys(), _KEY_COLUMNS)


@keys.command("create")
@click.option("--role", required=True, type=click.Choice(["viewer", "submitter", "operator", "machine", "balancer"]))
@click.option("--tenant", shell_complete=complete_tenant, help="Limit the key to this tenant.")
@click.option(
    "--machine",
    metavar="REGION/CLUSTER/MACHINE",
    shell_complete=complete_machine,
    help="With --role machine: the machine whose agent uses the key.",
)
@click.option("--label", default="", help="A note about the key's purpose.")
@click.option(
    "--person",
    help="Who submits with the key. Keys of one person, and a person's OIDC tokens (oidc:SUBJECT),"
    " count as one among the people of the tenant. Default: the key is a person of its own.",
)
@click.option("--expires", "expires_s", callback=duration(above_zero=True), metavar="DURATION",
              help="How long the key is valid, such as 90d. Default: no expiry.")  # fmt: skip
@click.pass_obj
def create_key(
    session: Session,
    role: str,
    tenant: str | None,
    machine: str | None,
    label: str,
    person: str | None,
    expires_s: float | None,
) -> None:
    """Create an API key and print it. The key cannot be shown again."""
    lifetime_s = None if expires_s is None else math.ceil(expires_s)
    key = session.client.create_key(role, tenant, label, lifetime_s, machine, person)
    expiry = "" if key["expires_at"] is None else f"; it expires at {formats.clock(key['expires_at'])}"
    say(f"key {key['id']}: save it now, it cannot be shown again{expiry}")
    emit_one(session, key, lambda: key["key"], name=key["key"])


@keys.command("revoke")
@click.argument("key_id")
@click.pass_obj
def revoke_key(session: Session, key_id: str) -> None:
    """Revoke an API key. It takes effect immediately."""
    session.client.revoke_key(key_id)
    emit_one(session, {"revoked": key_id}, lambda: key_id, name=key_id)


@click.command(cls=OutputCommand)
@limit_option("entries to show")
@click.pass_obj
def audit(session: Session, limit: int) -> None:
    """Show the audit log: who changed what."""
    emit_list(session, list(session.client.audit(limit)), _AUDIT_COLUMNS, name=lambda entry: str(entry["id"]))
