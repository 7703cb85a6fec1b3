"""The values of the secrets that a workload names, sealed to its machines."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from nacl.exceptions import CryptoError
from sqlalchemy.orm import Session
from temporalio.exceptions import ApplicationError

from activities.lifecycle import image_digests
from domain.images import PULL_LOGIN
from domain.slots import TaskSlots
from domain.spec import WorkloadSpec
from infra.db.models import Machine
from infra.db.tenants import Secret
from infra.keys import decrypt_secret, load_master_key, seal_for_machine


def secret_values(session: Session, spec: WorkloadSpec, master_key: Path) -> dict[str, str]:
    """Returns the values of the secrets that the workload names, by name. `master_key`: the key's file.

    Raises:
        ApplicationError: `MissingSecret` or `UnreadableSecret`.
    """
    names = {name for job in spec.jobs for name in job.secrets.values()}
    names |= {secret for _, secret in image_digests.images_of(spec) if secret is not None}
    if not names:
        return {}
    key = load_master_key(master_key)
    values = {}
    for name in sorted(names):
        row = session.get(Secret, (spec.tenant, name))
        if row is None:
            message = f"tenant {spec.tenant} has no secret {name} any more"
            raise ApplicationError(message, type="MissingSecret")
        try:
            values[name] = decrypt_secret(key, row.box)
        except CryptoError:
            message = (
                f"the master key in {master_key} cannot decrypt secret {name} of tenant {spec.tenant}; set it again"
            )
            raise ApplicationError(message, type="UnreadableSecret") from None
    return values


def sealed_secrets(
    values: Mapping[str, str], spec: WorkloadSpec, tasks: Sequence[TaskSlots], machines: Mapping[str, Machine]
) -> dict[str, str]:
    """Returns, for each machine, the secrets of the jobs whose tasks run there, sealed to the machine's key."""
    if not values:
        return {}
    out = {}
    for name, machine in machines.items():
        here = {task.job for task in tasks if task.machine == name}
        body = {job.name: {v: values[n] for v, n in job.secrets.items()} for job in spec.jobs if job.name in here}
        for job in spec.jobs:
            if job.name in here and job.image_pull_secret is not None:
                body[job.name][PULL_LOGIN] = values[job.image_pull_secret]
        try:
            out[name] = seal_for_machine(machine.public_key, json.dumps(body, sort_keys=True).encode())
        except ValueError:  # The agent cannot open it, so the gang is placed elsewhere, and the machine is blamed.
            out[name] = ""
    return out
