"""Object stores that do not answer."""

import logging

from botocore.exceptions import BotoCoreError, ClientError

from api.problems import Kind, Problem

STORAGE_ERRORS = (OSError, BotoCoreError, ClientError)
"""What reading a bucket may raise because of the bucket, and not because of the request."""
_log = logging.getLogger(__name__)


def storage_unavailable(error: Exception) -> Problem:
    """503: a region's bucket cannot be read now."""
    _log.warning("object store: %r", error)
    return Problem(Kind.STORAGE_UNAVAILABLE, "the region's bucket cannot be read now", headers={"Retry-After": "2"})
