"""Errors of object stores."""

import logging

from botocore.exceptions import BotoCoreError, ClientError

from api.problems import HttpProblem, ProblemType

STORAGE_ERRORS = (OSError, BotoCoreError, ClientError)
"""Errors that reading a bucket may raise because of the bucket, not because of the request."""
_log = logging.getLogger(__name__)


def storage_unavailable(error: Exception) -> HttpProblem:
    """Returns a 503 problem: a region's bucket cannot be read."""
    _log.warning("object store: %r", error)
    return HttpProblem(
        ProblemType.STORAGE_UNAVAILABLE, "the region's bucket cannot be read now", headers={"Retry-After": "2"}
    )
