"""Whether the master key opens the secrets that the database has; asked at the start of each process that uses it."""

from pathlib import Path

from nacl.exceptions import CryptoError
from sqlalchemy import Engine, delete, select, tuple_
from sqlalchemy.orm import Session

from infra.db.logs import Audit
from infra.db.models import Secret
from infra.db.session import transaction
from infra.errors import ConfigurationError
from infra.keys import decrypt_secret, load_master_key

FORGET_OPTION = "--forget-unreadable-secrets"
_NAMED = 3


def check_master_key(engine: Engine, path: Path) -> None:
    """Returns if the key in `path` opens every secret; without secrets, also where there is no key.

    Raises:
        ConfigurationError: it does not; how to restore it, and how to give the secrets up.
    """
    with transaction(engine) as session:
        _refuse(session, path)


def settle_master_key(engine: Engine, path: Path, *, forget_unreadable: bool = False) -> int:
    """`check_master_key`, and makes a key where there is none; how many secrets were forgotten.

    With `forget_unreadable`, secrets that the key does not open are deleted, with an entry in the audit list.

    Raises:
        ConfigurationError: see `check_master_key`, or the key's file is damaged.
    """
    with transaction(engine) as session:
        found = _unreadable(session, path) if forget_unreadable else []
        if found:
            session.execute(delete(Secret).where(tuple_(Secret.tenant, Secret.name).in_(found)))
            detail = {"because": "the master key does not open it"}
            for tenant, name in found:
                target = f"{tenant}/{name}"
                session.add(
                    Audit(actor="mizzen", tenant=tenant, action="secret.delete", target=target, detail=dict(detail))
                )
        else:
            _refuse(session, path)
    load_master_key(path, create=True)
    return len(found)


def _refuse(session: Session, path: Path) -> None:
    unreadable = _unreadable(session, path)
    if not unreadable:
        return
    named = ", ".join(f"{tenant}/{name}" for tenant, name in unreadable[:_NAMED])
    named += f" and {len(unreadable) - _NAMED} more" if len(unreadable) > _NAMED else ""
    found = "does not open" if path.exists() else "is lost, and no other key opens"
    raise ConfigurationError(
        f"master_key: {path} {found} {len(unreadable)} of the database's secrets ({named}). Restore the file from a"
        f" backup; or give these secrets up: `mizzen up {FORGET_OPTION}` (with a Postgres of your own:"
        f" `mizzen init {FORGET_OPTION}`) deletes them, and their tenants set them again"
    )


def _unreadable(session: Session, path: Path) -> list[tuple[str, str]]:
    """Tenant and name of the secrets that the key in `path` does not open; all of them without a key."""
    rows = session.execute(select(Secret.tenant, Secret.name, Secret.box).order_by(Secret.tenant, Secret.name)).all()
    if not rows:
        return []
    key = load_master_key(path) if path.exists() else None
    return [(tenant, name) for tenant, name, box in rows if key is None or not opens(key, box)]


def opens(key: bytes, box: bytes) -> bool:
    """Whether a secret was encrypted with this key."""
    try:
        decrypt_secret(key, box)
    except (CryptoError, ValueError):
        return False
    return True
