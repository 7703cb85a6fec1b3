"""Messages about services."""

from dataclasses import dataclass


@dataclass
class ServiceRef:
    """Reference to a service; the input of its workflow."""

    service: str


@dataclass
class ServiceStep:
    """The result of one decision about a service."""

    ended: bool
    """The service has ended, with all its replicas and their machines."""
    next_s: float = 0.0
    """Seconds until the next decision, if nothing happens before."""
