"""Messages about the elements of an array that a runner runs one after the other: leases, chunks and results."""

from dataclasses import dataclass, field


@dataclass
class ElementResult:
    """The result of a leased element on its machine."""

    index: int
    attempt: int
    """The number of its lease."""
    exit_code: int | None = None
    signal: int | None = None
    began_s: float | None = None
    """When its command was started, by the machine's clock, in seconds since the epoch; None: it was not, and will not
    be."""
    ended_s: float | None = None
    noticed: bool = False
    """Whether the element was asked to stop before it ended: its runner had to stop, or the element was cancelled."""
    timed_out: bool = False
    """Whether it was stopped because its maximum runtime was used up."""
    memory_limit_bytes: int | None = None
    memory_peak_bytes: int | None = None
    """Set if the kernel killed one of its processes because the runner had reached its memory limit."""

    @property
    def is_final(self) -> bool:
        """Whether the element has succeeded or failed: it ended, and not because of a notice."""
        return self.began_s is not None and self.ended_s is not None and not self.noticed


@dataclass
class LeasedElement:
    """An element that a runner may run, once."""

    index: int
    attempt: int


@dataclass
class LeaseRequest:
    """Request of a runner's attempt to finish the elements of its last chunk, and to lease those of the next one.

    Idempotent: while the attempt has leased elements without results, it gets these again.
    """

    workload_id: str
    """The runner."""
    attempt: int
    results: list[ElementResult] = field(default_factory=list)
    took_s: float = 0.0
    """How long the last chunk took, with the way to the agent and back."""
    ends: bool = False
    """Whether nothing is to be leased."""


@dataclass
class RunElements:
    """Request to an agent to run leased elements in the runner's attempt, or to end it if there are none."""

    workload_id: str
    attempt: int
    machine: str
    elements: list[LeasedElement]


@dataclass
class CancelElements:
    """Request to an agent to stop these elements of a runner's attempt, or not to start them."""

    workload_id: str
    attempt: int
    machine: str
    indexes: list[int]


@dataclass
class ElementsRun:
    """The results of a chunk; the heartbeats have those so far. Elements without a result may have been started."""

    results: list[ElementResult]
    is_over: bool = False
    """Whether the runner's attempt runs nothing more on its machine."""
