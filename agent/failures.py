"""Maps exceptions of a launch to the error types that workflows distinguish (`domain.blame`)."""

import errno

from temporalio.exceptions import ApplicationError

from agent.containers.local_images import BadImage, ImageUnavailable
from agent.ports import NoFreePort, PortTaken, TooManyPorts
from agent.record_files import DamagedRecord
from agent.sealed import CannotUnseal
from agent.staged import BadLaunch
from agent.staging import BucketUnavailable, ChangedLaunch, DamagedArchive
from agent.tasks import NotStarted
from domain.blame import TABLE, LaunchError
from infra.archives import BadArchive

_TYPES: dict[type[Exception], LaunchError] = {
    BadArchive: LaunchError.BAD_ARCHIVE,
    BadImage: LaunchError.BAD_IMAGE,
    BadLaunch: LaunchError.BAD_LAUNCH,
    BucketUnavailable: LaunchError.BUCKET_UNAVAILABLE,
    CannotUnseal: LaunchError.CANNOT_UNSEAL,
    ChangedLaunch: LaunchError.CHANGED_LAUNCH,
    DamagedArchive: LaunchError.DAMAGED_ARCHIVE,
    DamagedRecord: LaunchError.MACHINE_FAULT,
    ImageUnavailable: LaunchError.IMAGE_UNAVAILABLE,
    NoFreePort: LaunchError.NO_FREE_PORT,
    NotStarted: LaunchError.NOT_STARTED,
    PortTaken: LaunchError.PORT_TAKEN,
    TooManyPorts: LaunchError.TOO_MANY_PORTS,
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` says that the disk, or a disk quota, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def refusal(kind: LaunchError, message: str, *, final: bool | None = None) -> ApplicationError:
    """Returns the error to raise for a failed launch.

    `final` makes the error non-retryable on this machine. A type that `domain.blame.TABLE` marks as final is always
    non-retryable.
    """
    return ApplicationError(
        message, type=kind.value, non_retryable=TABLE[kind].final if final is None else final or TABLE[kind].final
    )


def launch_failure(error: Exception, *, final: bool) -> Exception:
    """Converts `error` to an `ApplicationError` with its launch error type. Returns unknown exceptions unchanged.

    `final`: this machine has no tries left, so the gang must be placed elsewhere.
    """
    if isinstance(error, ApplicationError):
        return error
    kind = _TYPES.get(type(error))
    message = str(error)
    if isinstance(error, BadArchive) and error.member is not None:
        message = f"{error.member!r}: {error}"
    if kind is None and isinstance(error, OSError):
        kind = LaunchError.DISK_FULL if is_disk_full(error) else LaunchError.MACHINE_FAULT
    final = final or isinstance(error, DamagedRecord)  # A retry reads the same, also if tasks were started.
    return error if kind is None else refusal(kind, message, final=final)
