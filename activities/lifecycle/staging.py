"""While staging, or the copy of a checkpoint, fails and is retried, shows why as the workload's reason."""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from temporalio.exceptions import ApplicationError, CancelledError

from domain.phases import Phase
from domain.protocol.workloads import CheckpointCopy, StageRequest
from domain.reasons import Reason, ReasonCode
from infra.db import events
from infra.db.models import Workload
from infra.db.session import transaction

_SHOWN_CHARACTERS = 500


def bucket_named(region: str) -> AbstractContextManager[None]:
    """Adds the region's name to errors of its bucket. See `store_named`."""
    return store_named(f"the bucket of region {region}")


@contextmanager
def store_named(name: str) -> Iterator[None]:
    """Adds a name to errors of a store.

    Raises:
        ApplicationError: the store raised an error. The message begins with `name`.
    """
    try:
        yield
    except (ApplicationError, CancelledError):
        raise
    except Exception as error:
        message = f"{name}: {error or type(error).__name__}"
        raise ApplicationError(message, type="Bucket") from error


@contextmanager
def failures_shown(engine: Engine, request: StageRequest | CheckpointCopy) -> Iterator[None]:
    """Writes the reason of a failure of staging or copying to the workload's row, and an event for each new cause.

    Raises:
        Exception: the error of staging, unchanged.
    """
    try:
        yield
    except (CancelledError, SQLAlchemyError):
        raise
    except Exception as error:
        if not (isinstance(error, ApplicationError) and error.non_retryable):
            _show(engine, request, str(error) or type(error).__name__)
        raise


def _show(engine: Engine, request: StageRequest | CheckpointCopy, error: str) -> None:
    with transaction(engine) as session:
        row = session.get(Workload, request.workload_id, with_for_update=True)
        if row is None or row.attempt != request.attempt or row.phase not in (Phase.PLACING, Phase.MIGRATING):
            return
        shown = error[:_SHOWN_CHARACTERS]
        reason = Reason(ReasonCode.STAGING_FAILED, {"region": row.region, "error": shown})
        row.reason = reason.to_json()
        cause = hashlib.sha256(shown.encode()).hexdigest()[:16]
        events.record(
            session,
            "workload.staging_failed",
            tenant=row.tenant,
            workload=row.id,
            attempt=row.attempt,
            region=row.region,
            reason=reason,
            dedup=f"{row.attempt}:staging:{cause}",
        )


def is_shown(row: Workload) -> bool:
    """Returns whether the workload's reason is a failure of staging."""
    return (row.reason or {}).get("code") == ReasonCode.STAGING_FAILED


def clear_failure(engine: Engine, request: StageRequest) -> None:
    """Removes a failure of staging from the workload's row after staging has succeeded."""
    with transaction(engine) as session:
        row = session.get_one(Workload, request.workload_id, with_for_update=True)
        if row.attempt == request.attempt and is_shown(row):
            row.reason = None
