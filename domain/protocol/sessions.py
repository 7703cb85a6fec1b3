"""Messages about sessions: connections of users into running tasks."""

from dataclasses import dataclass


@dataclass
class OpenSession:
    """Request to an agent to connect to the API for a session in one of its tasks.

    The activity returns when the connection is open, and not at its end.
    """

    session: str
    machine: str
    workload_id: str
    attempt: int
    job: str
    task: int
    url: str
    """URL of the API for agents."""
    sealed_token: str
    """The agent's token of the session, which can be used once, sealed to the machine's key."""


@dataclass
class SessionRefusal:
    """Why the agent cannot join a session."""

    session: str
    why: str
