"""Keys of machines: pinned at the first hello, and changed by an operator or by proof of the old key only.

Any client that may signal Temporal can send a hello in a machine's name. With a key of its own it would read the
secrets of the next launch there. So a key other than the pinned one is kept aside, and nothing is placed on the
machine, until the machine announces itself with the pinned key again, an operator trusts the new one, or the machine
shows that it holds both: it opens a challenge that is sealed to the pinned key and names the new one.
"""

import hashlib
import hmac
import json
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from domain.protocol import Hello
from domain.reasons import Reason, ReasonCode
from infra.config import Settings
from infra.db import events
from infra.db.models import Machine
from infra.errors import ConfigurationError
from infra.keys import key_fingerprint, load_master_key, seal_for_machine


def is_pinned(row: Machine, hello: Hello) -> bool:
    """Whether a machine announces itself with the key that it has. Then another that was offered is forgotten."""
    if row.public_key != hello.public_key:
        return False
    forget_offer(row)
    return True


def forget_offer(row: Machine) -> None:
    """The machine's key is known to be its own: an offered key is of no interest any more."""
    row.offered_key = row.offered_at = None
    if row.cordon is not None and row.cordon.get("code") == ReasonCode.KEY_NOT_TRUSTED:
        row.cordon = None


def accept_proven(session: Session, settings: Settings, row: Machine, hello: Hello) -> bool:
    """Pins the key of a hello that proves the old one; False where it does not."""
    wanted = _proof(settings, row, hello)
    if wanted is None or not hmac.compare_digest(wanted.encode(), hello.key_proof.encode()):
        return False
    row.public_key = hello.public_key
    forget_offer(row)
    events.record(session, "machine.key_changed", region=row.region, machine=row.id, detail={"by": "proof"})
    return True


def offer(session: Session, settings: Settings, row: Machine, hello: Hello) -> tuple[str | None, bool]:
    """Stores a new key as untrusted; returns a challenge for the holder of both keys, and if the machine is lost.

    A machine that does not announce itself with its own key for as long as a silent one may be away counts as lost.
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
    except ValueError:  # The pinned value is not a key, so no agent can prove it.
        return None


def _proof(settings: Settings, row: Machine, hello: Hello) -> str | None:
    """Known to the installation alone; nothing needs to be kept for it. None: there is no master key here."""
    try:
        secret = load_master_key(settings.master_key_path)
    except ConfigurationError:
        return None
    text = json.dumps(["machine key", row.id, row.public_key, hello.public_key])
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
