"""Checks that the master key decrypts the secrets in the database. Runs at the start of processes that use the key."""

from pathlib import Path

from nacl.exceptions import CryptoError
from sqlalchemy import Engine, delete, select, tuple_
from sqlalchemy.orm import Session

from infra.db.logs import Audit
from infra.db.session import transaction
from infra.db.tenants import Secret
from infra.errors import ConfigurationError
from infra.keys import decrypt_secret, load_master_key

FORGET_OPTION = "--forget-unreadable-secrets"
_NAMED = 3


def check_master_key(engine: Engine, path: Path) -> None:
    """Checks that the key in the file `path` decrypts every secret. If there are no secrets, the file may be missing.

    Raises:
        ConfigurationError: a secret cannot be decrypted. The message says how to restore the key or delete the secrets.
    """
    with transaction(engine) as session:
        _refuse(session, path)


def ensure_master_key(engine: Engine, path: Path, *, forget_unreadable: bool = False) -> int:
    """Checks the key like `check_master_key`, and creates it if it is missing. Returns the number of deleted secrets.

    With `forget_unreadable`, deletes the secrets that the key does not decrypt, each with an entry in the audit list.

    Raises:
        ConfigurationError: a secret cannot be decrypted, or the key's file is damaged.
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
    found = "does not decrypt" if path.exists() else "is missing, but is needed to decrypt"
    raise ConfigurationError(
        f"master_key: {path} {found} {len(unreadable)} of the database's secrets ({named}). Restore the file from a"
        f" backup; or delete these secrets with `mizzen up {FORGET_OPTION}` (with your own Postgres:"
        f" `mizzen init {FORGET_OPTION}`), and let their tenants set them again"
    )


def _unreadable(session: Session, path: Path) -> list[tuple[str, str]]:
    """Returns tenant and name of the secrets that the key in `path` does not decrypt; all of them if it is missing."""
    rows = session.execute(select(Secret.tenant, Secret.name, Secret.box).order_by(Secret.tenant, Secret.name)).all()
    if not rows:
        return []
    key = load_master_key(path) if path.exists() else None
    return [(tenant, name) for tenant, name, box in rows if key is None or not opens(key, box)]


def opens(key: bytes, box: bytes) -> bool:
    """Whether the encrypted secret `box` can be decrypted with `key`."""
    try:
        decrypt_secret(key, box)
    except (CryptoError, ValueError):
        return False
    return True
