"""Messages between the workflow of a placement run (the nightly run of Tetris) and its activities."""

from dataclasses import dataclass


@dataclass
class PlacementRunRef:
    """The id of a placement run, and the error if the placement run failed."""

    placement_run: str
    problem: str | None = None


@dataclass
class PlacementRunTicket:
    """The state of a placement run, which determines the next action of its workflow."""

    state: str
    """`planning` or `moving`; in every other state there is nothing to do."""
    lanes: int = 0
    """Number of moves that run concurrently."""
    solve_s: float = 0.0


@dataclass
class NextMove:
    """Request for the next move of a lane. If the lane has an unfinished move, that move is returned again."""

    placement_run: str
    lane: int


@dataclass
class MoveOrder:
    """The move that a lane has to carry out, or the reason why there is none now."""

    over: bool = False
    """The lane is done: no move is left, or the placement run's deadline has passed."""
    paused: bool = False
    number: int = 0
    table: str = ""
    source_region: str = ""
    target_region: str = ""


@dataclass
class MoveRef:
    """A move whose copy has ended, and the error if the copy failed."""

    placement_run: str
    number: int
    problem: str | None = None
