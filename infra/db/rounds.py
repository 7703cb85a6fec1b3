"""The published outcome of periodic loops, such as housekeeping and reconciling. The processes that run them write it.

A loop repeats rounds. A failed round is tried again, so a failure that persists would otherwise be visible only in a
log.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from infra.db.logs import Publication

_PREFIX = "loop/"
MOST_ERROR_CHARACTERS = 500
FAILING_AFTER = 3
"""A loop is failing if this many rounds in a row have failed."""


@dataclass(frozen=True)
class LoopState:
    """The outcome of the rounds of one loop."""

    late_s: float | None = None
    """The loop is late if no round has succeeded for this time, in seconds; None: it is never late."""
    succeeded_at_s: float | None = None
    """When a round last succeeded, in epoch seconds; None: never."""
    began_at_s: float | None = None
    """When the first round began, in epoch seconds; None: a round has ended before this was recorded."""
    failing_since_s: float | None = None
    """When the first of the current series of failed rounds ended, in epoch seconds; None: the last round succeeded."""
    failures: int = 0
    """The number of consecutive failed rounds."""
    error: str = ""
    """Error message of the last round, if it failed."""

    def judge(self, now_s: float) -> Literal["ok", "failing", "late"]:
        """Returns `failing` after several failures in a row, and `late` if no round has succeeded for long.

        A loop that never succeeded is late from the beginning of its first round on.
        """
        if self.failures >= FAILING_AFTER:
            return "failing"
        since_s = self.began_at_s if self.succeeded_at_s is None else self.succeeded_at_s
        is_late = self.late_s is not None and since_s is not None and now_s - since_s > self.late_s
        return "late" if is_late else "ok"


_FIELDS = frozenset(field.name for field in fields(LoopState))


def verification_of(region: str) -> str:
    """Returns the name of the loop that verifies the copies in a region."""
    return f"verification in {region}"


def note_start(session: Session, loop: str, late_s: float | None) -> None:
    """Records that a round of a loop began, if it is the first one."""
    state = LoopState(late_s, began_at_s=_now_s(session))
    session.execute(insert(Publication).values(name=_PREFIX + loop, body=asdict(state)).on_conflict_do_nothing())


def note_round(session: Session, loop: str, late_s: float | None, error: str | None) -> None:
    """Records that a round of a loop ended; `error` is None if it succeeded."""
    key = _PREFIX + loop
    session.execute(insert(Publication).values(name=key, body=asdict(LoopState())).on_conflict_do_nothing())
    before = _read(session.scalars(select(Publication.body).where(Publication.name == key).with_for_update()).one())
    now_s = _now_s(session)
    if error is None:
        state = LoopState(late_s, now_s)
    else:
        state = replace(
            before,
            late_s=late_s,
            failing_since_s=now_s if before.failing_since_s is None else before.failing_since_s,
            failures=before.failures + 1,
            error=error[:MOST_ERROR_CHARACTERS],
        )
    session.execute(
        update(Publication).where(Publication.name == key).values(body=asdict(state), at=func.clock_timestamp())
    )


def loop_states(session: Session) -> tuple[dict[str, LoopState], float]:
    """Returns the states of all loops by name, in order, and the database's clock in epoch seconds."""
    found = session.execute(
        select(Publication.name, Publication.body)
        .where(Publication.name.startswith(_PREFIX))
        .order_by(Publication.name)
    )
    return {name.removeprefix(_PREFIX): _read(body) for name, body in found}, _now_s(session)


def _read(body: dict[str, Any]) -> LoopState:
    """Reads a published state. A newer version may have published further fields."""
    return LoopState(**{name: value for name, value in body.items() if name in _FIELDS})


def forget_loop(session: Session, loop: str) -> None:
    """Deletes the state of a loop that no longer runs."""
    session.execute(delete(Publication).where(Publication.name == _PREFIX + loop))


def _now_s(session: Session) -> float:
    return float(session.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())
