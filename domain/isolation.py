"""How tasks are separated from the machine, from mizzen and from tasks of other tenants (`docs/trust.md`)."""

from enum import StrEnum


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


def strongest(*modes: str | None) -> Isolation:
    """Returns the strongest of `modes`; None requires nothing."""
    return max(
        (Isolation(mode) for mode in modes if mode is not None), key=lambda mode: mode.rank, default=Isolation.NONE
    )
