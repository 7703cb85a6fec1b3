"""Temporary credentials for Google Cloud Storage: an access token of the agent, restricted by an access boundary.

Tasks find the token in the file that `MIZZEN_GCS_TOKEN_FILE` names. The SDK reads it again before it expires. Google's
own libraries have no setting for such a file.
"""

from typing import Any

import google.auth
from google.auth import downscoped as _downscoped
from google.auth.transport.requests import Request

from agent.credentials.scope import BucketScope, Prefix

downscoped: Any = _downscoped
"""Without types: the library has none for it."""

_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_READ, _WRITE = "inRole:roles/storage.objectViewer", "inRole:roles/storage.objectAdmin"
_TIMEOUT_S = 10.0


def boundary(scope: BucketScope) -> Any:
    """Returns the access boundary that allows what is in `scope`: a rule for each bucket and kind of access."""
    rules = []
    for permission, prefixes in ((_WRITE, scope.writes), (_READ, scope.reads)):
        for bucket in dict.fromkeys(one.bucket for one in prefixes):
            allowed = " || ".join(_condition(one) for one in prefixes if one.bucket == bucket)
            rules.append(
                downscoped.AccessBoundaryRule(
                    available_resource=f"//storage.googleapis.com/projects/_/buckets/{bucket}",
                    available_permissions=[permission],
                    availability_condition=downscoped.AvailabilityCondition(allowed),
                )
            )
    return downscoped.CredentialAccessBoundary(rules)


def narrowed_token(scope: BucketScope) -> dict[str, Any]:
    """Returns a token for `scope` (`token`) and when it expires (`expiry`, ISO 8601 in UTC), within an hour.

    Raises:
        google.auth.exceptions.GoogleAuthError: the agent has no credentials, or the service refuses or does not answer.
    """
    source, _ = google.auth.default(scopes=_SCOPES)
    credentials = downscoped.Credentials(source, boundary(scope))
    credentials.refresh(_request)
    assert credentials.expiry is not None
    return {"token": credentials.token, "expiry": f"{credentials.expiry.isoformat()}Z"}


def _request(*args: Any, **kwargs: Any) -> Any:
    return Request()(*args, **{"timeout": _TIMEOUT_S, **kwargs})


def _condition(one: Prefix) -> str:
    quoted = one.prefix.replace("\\", "\\\\").replace("'", "\\'")
    name = f"resource.name.startsWith('projects/_/buckets/{one.bucket}/objects/{quoted}')"
    listed = f"api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('{quoted}')"
    return f"{name} || {listed}"
