"""Secrets whose values are in a service document: secrets of SkyPilot's files, and the TLS certificate with its key.

They are stored as secrets of the tenant.

The name of a stored secret depends on its value, so that a changed value creates a new version of the service. The name
contains a keyed digest, which reveals nothing about the value without the master key.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import Caller
from api.documents.service import ServiceDraft
from api.people.secrets import secrets_key, store_secret
from api.state import ApiState
from infra.db.services import ServiceRow
from infra.db.tenants import Secret

_DIGEST_BYTES = 6
_SERVICE, _VARIABLE = 27, 21
"""Maximum number of characters that the name of a secret takes from the names of the service and of the variable."""


def name_literals(session: Session, state: ApiState, draft: ServiceDraft) -> dict[str, str]:
    """Sets the names of the document's secrets in a valid draft, and adds notes. Returns the secrets to store, by name.

    Raises:
        HttpProblem: this process cannot encrypt secrets.
    """
    if not draft.literals and draft.certificate is None:
        return {}
    own = Secret.tenant == draft.tenant, Secret.name.in_(draft.literals.values())
    known = set(session.scalars(select(Secret.name).where(*own)))
    key = secrets_key(session, state)
    stored = {}

    def named(field: str, word: str, value: str) -> str:
        digest = blake2b(value.encode(), key=key, digest_size=_DIGEST_BYTES).hexdigest()
        parts = draft.fields["name"][:_SERVICE], word.lower()[:_VARIABLE], digest
        name = re.sub("[^a-z0-9]+", "-", "-".join(parts))
        stored[name] = value
        draft.notes.append(f"{field} is stored as secret {name} of the tenant until the service has ended")
        return name

    for variable, value in draft.literals.items():
        is_name = value in known
        draft.fields["secrets"][variable] = value if is_name else named(f"secrets.{variable}", variable, value)
    draft.literals.clear()
    if draft.certificate is not None:
        draft.fields["certificate"] = named("service.tls", "tls", draft.certificate)
        draft.certificate = None
    return stored


def store_literals(
    session: Session, state: ApiState, caller: Caller, row: ServiceRow, secrets: Mapping[str, str]
) -> None:
    """Stores secrets of a service by name.

    Raises:
        HttpProblem: the tenant has too many secrets.
    """
    for name, value in secrets.items():
        store_secret(session, state, caller, (row.tenant, name), value, row.id)
