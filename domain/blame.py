"""Every way in which the start of a gang can fail, and who is to blame: the one table of it.

Agents raise these types across Temporal, workflows judge by them, and `docs/operating.md` shows the table. A failure
that blames the workload fails it, for another machine would refuse it too. One that blames the machine counts towards
its cordon (`infra.config.LifecycleSettings.cordon_after_failed_gangs`). One that blames nobody sends the gang back to
the queue.
"""

from dataclasses import dataclass
from enum import StrEnum


class Blame(StrEnum):
    """Who is to blame."""

    WORKLOAD = "workload"
    MACHINE = "machine"
    NOBODY = "nobody"


class LaunchError(StrEnum):
    """The closed list of error types with which a launch fails; the value is the `ApplicationError`'s type."""

    BAD_ARCHIVE = "BadArchive"
    TOO_MANY_PORTS = "TooManyPorts"
    CANNOT_UNSEAL = "CannotUnseal"
    NO_FREE_PORT = "NoFreePort"
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
    TOO_SLOW = "TooSlow"
    MISSING_SECRET = "MissingSecret"
    MISSING_ARCHIVE = "MissingArchive"


@dataclass(frozen=True)
class Verdict:
    """What one of the errors means."""

    blame: Blame
    final: bool
    """Whether trying again on the same machine is pointless."""
    meaning: str


TABLE: dict[LaunchError, Verdict] = {
    LaunchError.BAD_ARCHIVE: Verdict(
        Blame.WORKLOAD, True, "the working directory cannot be unpacked, or its archive and `files` collide"
    ),
    LaunchError.TOO_MANY_PORTS: Verdict(
        Blame.WORKLOAD, True, "more jobs are led from one machine than its agent has rendezvous ports"
    ),
    LaunchError.CANNOT_UNSEAL: Verdict(
        Blame.MACHINE, True, "the agent's key does not open the secrets that were sealed to this machine"
    ),
    LaunchError.NO_FREE_PORT: Verdict(Blame.MACHINE, False, "all rendezvous ports of the agent's range are in use"),
    LaunchError.NOT_STARTED: Verdict(Blame.MACHINE, False, "the process that supervises a task could not start it"),
    LaunchError.MACHINE_FAULT: Verdict(
        Blame.MACHINE, False, "the operating system refused what the agent needs (input/output error, no permission)"
    ),
    LaunchError.SILENT: Verdict(
        Blame.MACHINE, True, "the agent did not answer in time: the machine counts as lost (`machine_lost`)"
    ),
    LaunchError.DISK_FULL: Verdict(Blame.NOBODY, False, "the disk of the agent's folder is full, or its quota is used"),
    LaunchError.BUCKET_UNAVAILABLE: Verdict(
        Blame.NOBODY, False, "the region's bucket did not answer, or an object is missing in it"
    ),
    LaunchError.DAMAGED_ARCHIVE: Verdict(
        Blame.NOBODY, True, "the archive in the bucket has another checksum; the next attempt writes it again"
    ),
    LaunchError.BAD_LAUNCH: Verdict(
        Blame.NOBODY, True, "the launch description is unreadable or of another attempt (agent and worker differ)"
    ),
    LaunchError.CHANGED_LAUNCH: Verdict(
        Blame.NOBODY, True, "the launch description in the bucket is not the one that the scheduler wrote"
    ),
    LaunchError.STOPPED_ATTEMPT: Verdict(Blame.NOBODY, True, "the attempt was stopped on this machine before"),
    LaunchError.WRONG_MACHINE: Verdict(Blame.NOBODY, True, "the agent of another machine took the request"),
    LaunchError.TOO_SLOW: Verdict(Blame.NOBODY, True, "preparing took longer than ten minutes, with heartbeats"),
    LaunchError.MISSING_SECRET: Verdict(
        Blame.NOBODY, False, "a secret that the workload names does not exist any more; the launch waits for it"
    ),
    LaunchError.MISSING_ARCHIVE: Verdict(
        Blame.NOBODY, False, "the uploaded archive does not exist any more; the launch waits for it"
    ),
}


def verdict(error_type: str | None) -> Verdict:
    """The verdict on an error type. A type that is not in the list, of an agent of another version, blames nobody."""
    try:
        return TABLE[LaunchError(error_type or "")]
    except ValueError:
        return Verdict(Blame.NOBODY, False, "an error that is not in the list")


def markdown() -> str:
    """The table as the documentation has it."""
    rows = [f"| `{error.value}` | {row.blame.value} | {row.meaning} |" for error, row in TABLE.items()]
    return "\n".join(["| error | blames | when |", "| --- | --- | --- |", *rows])
