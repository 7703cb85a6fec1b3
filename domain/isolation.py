"""How tasks are separated from the machine, from mizzen and from tasks of other tenants (`docs/trust.md`)."""

import os.path
from enum import StrEnum

_TOO_WIDE = ("/", "/proc", "/dev", "/tmp", "/var/tmp", "/run", "/home", "/root", "/var")


class Isolation(StrEnum):
    """The modes of a machine, from the weakest to the strongest."""

    NONE = "none"
    """Tasks run as the agent's user, or as the one user of `run_as`."""
    USER = "user"
    """Each tenant's tasks run as a user of their own. Needs an agent that runs as root."""
    SANDBOX = "sandbox"
    """Also in namespaces of their attempt, in which they see only their files and processes."""

    @property
    def rank(self) -> int:
        """Position in the order of modes: a machine meets a minimum if its mode's rank is not lower."""
        return list(Isolation).index(self)


class TaskNetwork(StrEnum):
    """The network of the tasks in sandboxes."""

    HOST = "host"
    """That of the machine."""
    PORTS = "ports"
    """One of the attempt's own, to which only declared ports of the machine lead (`agent.task_network`)."""


def strongest(*modes: str | None) -> Isolation:
    """Returns the strongest of `modes`; None requires nothing."""
    return max(
        (Isolation(mode) for mode in modes if mode is not None), key=lambda mode: mode.rank, default=Isolation.NONE
    )


def sandbox_path(text: str) -> tuple[str, bool]:
    """Returns the path in an entry of `tasks.paths`, and whether tasks may write there (`PATH:rw`).

    Raises:
        ValueError: the entry is not an absolute path, or hides what a sandbox consists of.
    """
    path, separator, mode = text.partition(":")
    if not path.startswith("/") or os.path.normpath(path) != path.rstrip("/") or (separator and mode != "rw"):
        raise ValueError(f"{text!r} must be an absolute path without '..', and may end with :rw")
    if path in _TOO_WIDE or path.startswith("/proc/"):
        raise ValueError(f"{text!r} is too wide: name the folder that tasks need, for example /mnt/datasets")
    return path, bool(separator)
