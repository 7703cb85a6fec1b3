"""Keys of machines: a key is pinned at the first hello, and only an operator or a proof of the old key changes it.

Any client that may signal Temporal can send a hello in a machine's name. With its own key, it could read the secrets of
the next launch there. So a key that differs from the pinned one is stored as an offer, and the machine gets no work
until one of three things happens: the machine announces itself with the pinned key again, an operator trusts the new
key, or the machine proves that it holds both keys. The proof is to open a challenge that is sealed to the pinned key
and contains the new key.
"""

import hashlib
import hmac
import json
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from domain.protocol.machines import Hello
from domain.reasons import Reason, ReasonCode
from infra.config.settings import Settings
from infra.db import events
from infra.db.models import Machine
from infra.errors import ConfigurationError
from infra.keys import key_fingerprint, load_master_key, seal_for_machine


def is_pinned(row: Machine, hello: Hello) -> bool:
    """Returns whether a hello contains the pinned key. If so, removes an offered key."""
    if row.public_key != hello.public_key:
        return False
    forget_offer(row)
    return True


def forget_offer(row: Machine) -> None:
    """Removes the offered key of a machine, and the cordon because of it."""
    row.offered_key = row.offered_at = None
    if row.cordon is not None and row.cordon.get("code") == ReasonCode.KEY_NOT_TRUSTED:
        row.cordon = None


def accept_proven(session: Session, settings: Settings, row: Machine, hello: Hello) -> bool:
    """Pins the new key of a hello if it contains a proof of the old key; returns whether it did."""
    wanted = _proof(settings, row, hello)
    if wanted is None or not hmac.compare_digest(wanted.encode(), hello.key_proof.encode()):
        return False
    row.public_key = hello.public_key
    forget_offer(row)
    events.record(session, "machine.key_changed", region=row.region, machine=row.id, detail={"by": "proof"})
    return True


def offer(session: Session, settings: Settings, row: Machine, hello: Hello) -> tuple[str | None, bool]:
    """Stores a new key as untrusted; returns a challenge for the holder of both keys, and whether the machine is lost.

    A machine that offers an untrusted key for longer than the timeout of a silent machine counts as lost.
    """
    if row.offered_key != hello.public_key:
        row.offered_key, row.offered_at = hello.public_key, row.offered_at or func.now()
        reason = _reason(row)
        row.cordon = row.cordon or reason.to_json()
        events.record(session, "machine.key_offered", region=row.region, machine=row.id, reason=reason)
    if row.state == "ready":
        row.state = "joining"
    session.flush()
    patience = timedelta(seconds=settings.lifecycle.heartbeat_timeout_s + settings.lifecycle.node_lost_after_s)
    away = session.scalar(select(Machine.offered_at < func.now() - patience).where(Machine.id == row.id))
    return _challenge(settings, row, hello), bool(away) and row.state != "lost"


def _reason(row: Machine) -> Reason:
    shown = {"key": key_fingerprint(row.offered_key or ""), "pinned": key_fingerprint(row.public_key)}
    return Reason(ReasonCode.KEY_NOT_TRUSTED, {"machine": row.id, **shown})


def _challenge(settings: Settings, row: Machine, hello: Hello) -> str | None:
    proof = _proof(settings, row, hello)
    if proof is None:
        return None
    body = {"machine": row.id, "key": hello.public_key, "proof": proof}
    try:
        return seal_for_machine(row.public_key, json.dumps(body).encode())
    except ValueError:  # The pinned value is not a valid key, so no agent can prove that it holds it.
        return None


def _proof(settings: Settings, row: Machine, hello: Hello) -> str | None:
    """Returns the proof for a key change. It is derived from the master key and not stored; None: no master key."""
    try:
        secret = load_master_key(settings.master_key_path)
    except ConfigurationError:
        return None
    text = json.dumps(["machine key", row.id, row.public_key, hello.public_key])
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
