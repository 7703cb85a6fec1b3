"""Admission of launched machines: the first hello of such a machine must contain the join token of its instance."""

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from domain.ids import machine_id
from domain.protocol.machines import Hello
from infra.config.settings import Settings
from infra.db import outbox
from infra.db.capacity import InstanceRow
from infra.db.models import Machine
from infra.keys import load_master_key


def join_token(master_key: Path, instance: str) -> str:
    """Returns the join token of an instance. It is derived from the installation's master key and is not stored.

    So a launch that is repeated after a crash gives the machine the same token.

    Raises:
        ConfigurationError: this machine has no master key.
    """
    return hmac.new(load_master_key(master_key), f"join token {instance}".encode(), hashlib.sha256).hexdigest()


_log = logging.getLogger(__name__)


def admits(session: Session, settings: Settings, hello: Hello) -> bool:
    """Returns whether the ledger allows a machine to be registered.

    A static machine is always allowed. A launched machine must present its join token in its first hello. Afterwards
    its pinned key identifies it, like any other machine (`activities.lifecycle.machine_keys`). The token is bound to
    the first machine that presents it: a provider without client tokens may have started two. Locks the instance's row;
    the caller locks the machine's row after it.
    """
    name = hello.instance or hello.machine.rpartition("/")[2]
    row = session.get(InstanceRow, name, with_for_update=True)
    if row is None:
        return not hello.instance or _refuse(hello, "the instance is not in the ledger")
    if hello.machine != machine_id(row.region, row.cluster, row.id):
        return _refuse(hello, f"the instance's machine is {machine_id(row.region, row.cluster, row.id)}")
    if row.gone_at is not None:
        return _refuse(hello, "the instance is gone")
    # The token is also checked if the machine is not registered, because then no pinned key identifies it.
    if row.machine is None or session.get(Machine, hello.machine) is None:
        wanted = join_token(settings.master_key_path, row.id)
        if not hmac.compare_digest(hello.join_token.encode(), wanted.encode()):
            return _refuse(hello, "the join token does not belong to the instance")
        if hello.native_id and row.native_id not in (None, hello.native_id):
            return _refuse(hello, f"the instance is {row.native_id} at its provider, and this is {hello.native_id}")
        if row.native_id is None and hello.native_id:
            others = select(InstanceRow.id).where(
                InstanceRow.provider == row.provider,
                InstanceRow.native_id == hello.native_id,
                InstanceRow.gone_at.is_(None),
            )
            if session.scalar(others.limit(1)) is not None:
                return _refuse(hello, f"{hello.native_id} is another instance at its provider")
            row.native_id, row.launched_at = hello.native_id, func.now()
        row.machine, row.started_at = hello.machine, row.started_at or func.now()
    return True


def ending(session: Session, machine: str) -> dict[str, Any] | None:
    """Returns why the instance that belongs to a machine is to end; None if it is not.

    Its machine must get no work even if it joins before the instance's workflow has drained it.
    """
    return session.scalar(
        select(InstanceRow.ending).where(
            InstanceRow.machine == machine, InstanceRow.gone_at.is_(None), InstanceRow.ending.is_not(None)
        )
    )


def pool_of(session: Session, machine: str) -> str:
    """Returns the pool for which a machine was launched; empty: it was not launched for a pool."""
    launched = InstanceRow.machine == machine, InstanceRow.gone_at.is_(None), InstanceRow.workload.is_(None)
    return session.scalar(select(InstanceRow.pool).where(*launched)) or ""


def notify_instance(session: Session, machine: str) -> None:
    """Signals the workflow of the instance that belongs to a machine, if there is one, to read the ledger."""
    live = select(InstanceRow.id).where(InstanceRow.machine == machine, InstanceRow.gone_at.is_(None))
    if (instance := session.scalar(live)) is not None:
        outbox.instance(session, instance)


def _refuse(hello: Hello, why: str) -> bool:
    _log.warning("machine %s, announced as instance %r, is refused: %s", hello.machine, hello.instance, why)
    return False
