"""The table of launch errors: every way in which the start of a gang can fail, with the part that is to blame.

Agents raise these error types through Temporal, workflows act on them, and `docs/operating.md` shows the table. An
error that blames the workload fails the workload, because every other machine would refuse it too. An error that
blames the machine counts towards the machine's cordon (`infra.config.LifecycleSettings.cordon_after_failed_gangs`).
An error that blames neither the machine nor the workload returns the gang to the queue.
"""

from dataclasses import dataclass
from enum import StrEnum


class Blame(StrEnum):
    """The cause of a launch error: the workload, the machine, or neither."""

    WORKLOAD = "workload"
    MACHINE = "machine"
    NOBODY = "nobody"


class LaunchError(StrEnum):
    """The error types with which a launch can fail. Each value is the type of the Temporal `ApplicationError`."""

    BAD_ARCHIVE = "BadArchive"
    TOO_MANY_PORTS = "TooManyPorts"
    BAD_IMAGE = "BadImage"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    CANNOT_UNSEAL = "CannotUnseal"
    NO_FREE_PORT = "NoFreePort"
    PORT_TAKEN = "PortTaken"
    NOT_STARTED = "NotStarted"
    MACHINE_FAULT = "MachineFault"
    SILENT = "Silent"
    DISK_FULL = "DiskFull"
    BUCKET_UNAVAILABLE = "BucketUnavailable"
    DAMAGED_ARCHIVE = "DamagedArchive"
    BAD_LAUNCH = "BadLaunch"
    CHANGED_LAUNCH = "ChangedLaunch"
    STOPPED_ATTEMPT = "StoppedAttempt"
    WRONG_MACHINE = "WrongMachine"
    TAKEN_BACK = "TakenBack"
    TOO_SLOW = "TooSlow"
    MISSING_SECRET = "MissingSecret"
    MISSING_ARCHIVE = "MissingArchive"


@dataclass(frozen=True)
class Verdict:
    """The meaning of a launch error, and how it is handled."""

    blame: Blame
    final: bool
    """True if a retry on the same machine cannot succeed."""
    meaning: str


TABLE: dict[LaunchError, Verdict] = {
    LaunchError.BAD_ARCHIVE: Verdict(
        Blame.WORKLOAD, True, "the working directory cannot be unpacked, or its archive and `files` collide"
    ),
    LaunchError.TOO_MANY_PORTS: Verdict(
        Blame.WORKLOAD, True, "one machine runs task 0 of more jobs than its agent has rendezvous ports"
    ),
    LaunchError.BAD_IMAGE: Verdict(
        Blame.WORKLOAD, True, "the registry has no such image, or the image has no command and the job gives none"
    ),
    LaunchError.IMAGE_UNAVAILABLE: Verdict(
        Blame.NOBODY,
        False,
        "the registry does not respond or refuses the login, or the container engine fails",
    ),
    LaunchError.CANNOT_UNSEAL: Verdict(
        Blame.MACHINE, True, "the agent's key cannot decrypt the secrets that were sealed for this machine"
    ),
    LaunchError.NO_FREE_PORT: Verdict(Blame.MACHINE, False, "all ports of the agent's range are in use"),
    LaunchError.PORT_TAKEN: Verdict(
        Blame.NOBODY,
        True,
        "another process uses the fixed port of the service on this machine, and the agent cannot map the port",
    ),
    LaunchError.NOT_STARTED: Verdict(Blame.MACHINE, False, "the process that supervises a task could not start it"),
    LaunchError.MACHINE_FAULT: Verdict(
        Blame.MACHINE, False, "the operating system refused a call of the agent (input/output error, permission denied)"
    ),
    LaunchError.SILENT: Verdict(
        Blame.MACHINE, True, "the agent did not respond in time; the machine counts as lost (`machine_lost`)"
    ),
    LaunchError.DISK_FULL: Verdict(
        Blame.NOBODY, False, "the disk with the agent's folder is full, or its disk quota is used up"
    ),
    LaunchError.BUCKET_UNAVAILABLE: Verdict(
        Blame.NOBODY, False, "the region's bucket or the cluster's store did not respond, or lacks an object"
    ),
    LaunchError.DAMAGED_ARCHIVE: Verdict(
        Blame.NOBODY, True, "the checksum of the archive in the bucket is wrong; the next attempt uploads it again"
    ),
    LaunchError.BAD_LAUNCH: Verdict(
        Blame.NOBODY,
        True,
        "the launch description is unreadable or of another attempt (different agent version)",
    ),
    LaunchError.CHANGED_LAUNCH: Verdict(
        Blame.NOBODY, True, "the launch description in the bucket is not the one that the scheduler wrote"
    ),
    LaunchError.STOPPED_ATTEMPT: Verdict(Blame.NOBODY, True, "the attempt was already stopped on this machine"),
    LaunchError.WRONG_MACHINE: Verdict(Blame.NOBODY, True, "the agent of another machine received the request"),
    LaunchError.TAKEN_BACK: Verdict(
        Blame.NOBODY, True, "the owner has taken the machine, or the GPUs of the task, back"
    ),
    LaunchError.TOO_SLOW: Verdict(
        Blame.NOBODY, True, "preparation took longer than ten minutes although the agent sent heartbeats"
    ),
    LaunchError.MISSING_SECRET: Verdict(
        Blame.NOBODY,
        False,
        "a secret that the workload names no longer exists; the launch waits for a new one",
    ),
    LaunchError.MISSING_ARCHIVE: Verdict(
        Blame.NOBODY, False, "the uploaded archive no longer exists; the launch waits until it is uploaded again"
    ),
}


def verdict(error_type: str | None) -> Verdict:
    """Returns the verdict on an error type. An unknown type is from an agent of another version: no blame."""
    try:
        return TABLE[LaunchError(error_type or "")]
    except ValueError:
        return Verdict(Blame.NOBODY, False, "an unknown error type")
