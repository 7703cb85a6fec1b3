"""What Slurm's errors say about a request: refused, or unknown. They are the same in commands and in slurmrestd."""

from capacity.provider import LaunchRefused, Refusal

_UNKNOWN = (
    "Unable to contact slurm controller", "Socket timed out", "temporarily unable", "Resource temporarily unavailable",
    "Zero Bytes", "standby mode", "authentication", "Munge", "munge", "Connection", "Transport endpoint",
    "Insane message length", "shutdown", "Communication",
)  # fmt: skip
_KINDS = {
    Refusal.CAPACITY: (
        "node configuration is not available", "nodes are busy", "DOWN, DRAINED", "Required node not available",
        "partition not available", "partition configuration not available", "reservation not usable now",
        "maintenance reservation",
    ),
    Refusal.QUOTA: ("QOS", "accounting", "Assoc", "limit on the number"),
}  # fmt: skip


def is_unknown(said: str) -> bool:
    """Returns whether the outcome of a request with this error is unknown, or does not depend on the request."""
    return any(part in said for part in _UNKNOWN)


def refused(said: str) -> LaunchRefused:
    """Returns the error of a submission that Slurm refused."""
    found = (kind for kind, parts in _KINDS.items() if any(part in said for part in parts))
    return LaunchRefused(next(found, Refusal.REQUEST), said)
