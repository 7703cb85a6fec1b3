"""What the workflow of a night and its activities say to each other."""

from dataclasses import dataclass


@dataclass
class NightRef:
    """A night by its id, with why it failed if it did."""

    night: str
    problem: str | None = None


@dataclass
class NightTicket:
    """What is to be done of a night."""

    state: str
    """`planning`, `moving`; anything else: nothing is to be done."""
    lanes: int = 0
    """Moves at the same time."""
    solve_s: float = 0.0


@dataclass
class NextMove:
    """Asks for a lane's next move; the one that it has and has not finished comes again."""

    night: str
    lane: int


@dataclass
class MoveOrder:
    """A move that has begun, or why there is none now."""

    over: bool = False
    """The lane is done: nothing waits any more, or the deadline is over."""
    paused: bool = False
    number: int = 0
    table: str = ""
    source_region: str = ""
    target_region: str = ""


@dataclass
class MoveRef:
    """A move whose copy has ended, with why it failed if it did."""

    night: str
    number: int
    problem: str | None = None
