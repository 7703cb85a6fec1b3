"""API keys of machines on which mizzen itself starts agents: machines of the embedded fleet, and launched instances.

A key is derived from the master key, so that a repeated start or launch yields the same key. Other machines
get their keys from an operator.
"""

import base64
import hashlib
import hmac
from pathlib import Path

from sqlalchemy import delete
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from infra.db.tenants import ApiKey
from infra.keys import KEY_PREFIX, hash_api_key, load_master_key


def put_machine_key(session: Session, master_key: Path, machine: str, instance: str = "") -> str:
    """Returns the key of a machine, and adds it to the database. A revoked key stays revoked.

    `instance`: the id of the instance that the machine is launched for.

    Raises:
        ConfigurationError: this machine has no master key.
    """
    key_id, key = _derived(master_key, machine, instance)
    row = {"id": key_id, "sha256": hash_api_key(key), "role": "machine", "machine": machine, "label": _label(instance)}
    session.execute(insert(ApiKey).values(**row).on_conflict_do_nothing())
    return key


def drop_instance_key(session: Session, machine: str, instance: str) -> None:
    """Deletes the key of an instance that is gone, if it had one. Needs no master key."""
    session.execute(delete(ApiKey).where(ApiKey.machine == machine, ApiKey.label == _label(instance)))


def _label(instance: str) -> str:
    return f"instance {instance}" if instance else "embedded fleet"


def _derived(master_key: Path, machine: str, instance: str) -> tuple[str, str]:
    """Returns the id of a key, and the key."""
    secret = hmac.new(load_master_key(master_key), f"machine key {machine} {instance}".encode(), hashlib.sha256)
    key_id = hashlib.sha256(b"id " + secret.digest()).hexdigest()[:12]
    return key_id, f"{KEY_PREFIX}{key_id}_{base64.urlsafe_b64encode(secret.digest()).decode().rstrip('=')}"
