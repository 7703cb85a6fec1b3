"""The first hello of a machine that was launched: it is let in if it shows the token of an instance that is awaited."""

import hmac
import logging

from sqlalchemy import select
from sqlalchemy.orm import Session

from activities.capacity.tokens import join_token
from domain.ids import machine_id
from domain.protocol import Hello
from infra.config import Settings
from infra.db import outbox
from infra.db.capacity import InstanceRow
from infra.db.models import Machine

_log = logging.getLogger(__name__)


def admits(session: Session, settings: Settings, hello: Hello) -> bool:
    """Whether a machine may be registered, as far as the ledger has a say.

    A static machine always may. A launched machine must show its join token at its first hello; afterwards its pinned
    key identifies it, as for every machine (`activities.lifecycle.machine_keys`). Locks the instance's row; the caller
    locks the machine's after it.
    """
    name = hello.instance or hello.machine.rpartition("/")[2]
    row = session.get(InstanceRow, name, with_for_update=True)
    if row is None:
        return not hello.instance or _refuse(hello, "the ledger has no such instance")
    if hello.machine != machine_id(row.region, row.cluster, row.id):
        return _refuse(hello, f"the instance is machine {machine_id(row.region, row.cluster, row.id)}")
    if row.gone_at is not None:
        return _refuse(hello, "the instance is gone")
    # Once more where the machine is not known: no key says who it is.
    if row.machine is None or session.get(Machine, hello.machine) is None:
        wanted = join_token(settings.master_key_path, row.id)
        if not hmac.compare_digest(hello.join_token.encode(), wanted.encode()):
            return _refuse(hello, "its join token is not the instance's")
        row.machine = hello.machine
    return True


def look(session: Session, machine: str) -> None:
    """Tells the workflow of the instance that a machine is, if it is one, that something has changed."""
    live = select(InstanceRow.id).where(InstanceRow.machine == machine, InstanceRow.gone_at.is_(None))
    if (instance := session.scalar(live)) is not None:
        outbox.instance(session, instance)


def _refuse(hello: Hello, why: str) -> bool:
    _log.warning("machine %s announces itself as instance %r and is refused: %s", hello.machine, hello.instance, why)
    return False
