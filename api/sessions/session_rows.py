"""The rows of sessions: the use of their tokens, their renewal and their end, with the entries of the audit log."""

import hashlib
import json
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.orm import Session

from domain.ids import SESSION_PREFIX
from domain.phases import Phase
from domain.protocol.sessions import OpenSession
from infra.db import outbox
from infra.db.logs import Audit
from infra.db.models import Attempt, Machine, Workload
from infra.db.task_sessions import TaskSession, forget_stale
from infra.db.tenants import ApiKey, Secret
from infra.errors import ConfigurationError
from infra.keys import decrypt_secret, load_master_key, seal_for_machine

UNUSED_S = 30
"""A client must connect within this time after its request."""
_MASK = "***"
_MIN_LINE = 8
"""Lines of a multi-line secret that are shorter than this are masked only within the whole secret, as in logs."""
_MAX_COMMAND = 2000
"""Maximum length of a command in the audit log, in characters."""
_OIDC = "oidc:"


@dataclass(frozen=True)
class OpenedSession:
    """A session whose client has connected."""

    id: str
    workload: str
    tenant: str
    attempt: int
    job: str
    task: int
    machine: str
    actor: str
    kind: str


def new_id() -> str:
    """Returns the id of a new session."""
    return f"{SESSION_PREFIX}{secrets.token_hex(8)}"


def new_token() -> tuple[str, str]:
    """Returns a token and its hash."""
    token = secrets.token_urlsafe(32)
    return token, hash_of(token)


def hash_of(token: str) -> str:
    """Returns the hash of a token. A token has 256 random bits, so the hash needs no salt and may be fast."""
    return hashlib.sha256(token.encode()).hexdigest()


def count_open(session: Session, tenant: str) -> int:
    """Returns the number of a tenant's sessions. Until the transaction ends, no other transaction can add one."""
    lock = text("select pg_advisory_xact_lock(hashtext('session'), hashtext(:tenant))")
    session.execute(lock, {"tenant": tenant})
    forget_stale(session)
    return session.scalar(select(func.count()).where(TaskSession.tenant == tenant)) or 0


def claim(session: Session, id_: str, token: str, process_url: str) -> OpenedSession | None:
    """Consumes the client's token. Returns None if there is no such session, or the token is not valid any more."""
    young = text(f"created_at > clock_timestamp() - interval '{UNUSED_S} s'")
    row = session.scalars(
        update(TaskSession)
        .where(TaskSession.id == id_, TaskSession.client_sha256 == hash_of(token), young)
        .values(client_sha256=None, process_url=process_url, seen_at=func.clock_timestamp())
        .returning(TaskSession)
    ).first()
    if row is None:
        return None
    return OpenedSession(
        row.id, row.workload, row.tenant, row.attempt, row.job, row.task, row.machine, row.actor, row.kind
    )


def call_agent(session: Session, opened: OpenedSession, url: str, detail: dict[str, Any]) -> str | None:
    """Writes the beginning of a session into the audit log, and a message that asks the agent to join it at `url`.

    Returns the hash of the agent's token; None: the machine or the session does not exist any more.
    """
    machine = session.get(Machine, opened.machine)
    token, sha256 = new_token()
    known = update(TaskSession).where(TaskSession.id == opened.id).values(agent_sha256=sha256)
    if machine is None or session.scalar(known.returning(TaskSession.id)) is None:
        return None
    sealed = seal_for_machine(machine.public_key, token.encode())
    where = {"job": opened.job, "task": opened.task, "attempt": opened.attempt, "machine": opened.machine}
    _audit(session, opened, f"session.{opened.kind}", {**where, **detail})
    request = OpenSession(
        opened.id, opened.machine, opened.workload, opened.attempt, opened.job, opened.task, url, sealed
    )
    outbox.task_session(session, request)
    return sha256


def refusal_of(session: Session, id_: str) -> str | None:
    """Returns why the agent cannot join a session; None: no reason is recorded, or it has joined."""
    return session.scalar(select(TaskSession.refusal).where(TaskSession.id == id_))


def reason_of(session: Session, opened: OpenedSession) -> str | None:
    """Returns why the workload's attempt is being stopped or has ended, as a sentence; None: no reason is recorded."""
    attempt, row = session.get(Attempt, (opened.workload, opened.attempt)), session.get(Workload, opened.workload)
    found = None if attempt is None else attempt.outcome
    if found is None and row is not None and row.attempt == opened.attempt and Phase(row.phase) is not Phase.RUNNING:
        found = row.reason
    return None if found is None else str(found.get("sentence") or "") or None


def process_of(session: Session, id_: str) -> str | None:
    """Returns the URL of the API process that has the client of a session; None: no process has it."""
    return session.scalar(select(TaskSession.process_url).where(TaskSession.id == id_))


def renew(session: Session, ids: Collection[str]) -> set[str]:
    """Renews the rows of sessions. Returns the ids of the renewed ones.

    A session that is not renewed must end: its row was deleted, or its API key was revoked or has expired.
    """
    forget_stale(session)
    good = TaskSession.actor.startswith(_OIDC) | TaskSession.actor.in_(select(ApiKey.id).where(ApiKey.is_good()))
    mine = update(TaskSession).where(TaskSession.id.in_(ids), good).values(seen_at=func.clock_timestamp())
    return set(session.scalars(mine.returning(TaskSession.id)))


def end(session: Session, opened: OpenedSession, detail: dict[str, Any]) -> None:
    """Deletes the row of a session, and writes its end into the audit log. Does nothing if it is deleted already."""
    gone = delete(TaskSession).where(TaskSession.id == opened.id).returning(TaskSession.id)
    if session.scalar(gone) is not None:
        _audit(session, opened, "session.end", detail)


def masked(session: Session, tenant: str, master_key: Path, command: Sequence[str]) -> str:
    """Returns a command for the audit log, in which the values of the tenant's secrets are masked.

    If they cannot be decrypted, only the program's name is returned.
    """
    boxes = session.scalars(select(Secret.box).where(Secret.tenant == tenant)).all()
    try:
        key = load_master_key(master_key) if boxes else b""
    except ConfigurationError:
        return f"{command[0]} {_MASK}"
    return mask_words(command, [decrypt_secret(key, box) for box in boxes])


def mask_words(command: Sequence[str], values: Iterable[str]) -> str:
    """Returns a command as JSON, with all `values`, and their long lines, masked."""
    found = {line for value in values for line in (value, *(v for v in value.splitlines() if len(v) >= _MIN_LINE))}
    words = []
    for word in command:
        for value in sorted(filter(None, found), key=len, reverse=True):
            word = word.replace(value, _MASK)
        words.append(word)
    return json.dumps(words, ensure_ascii=False)[:_MAX_COMMAND]


def _audit(session: Session, opened: OpenedSession, action: str, detail: dict[str, Any]) -> None:
    session.add(
        Audit(
            actor=opened.actor, tenant=opened.tenant, action=action, target=opened.workload,
            detail={"session": opened.id, **detail},
        )
    )  # fmt: skip
