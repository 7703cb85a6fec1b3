"""Phases over time as bars: a row for the waits, and one for each attempt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from api.workloads.views import AttemptView, WorkloadView

WIDTH = 1000
"""Width of the chart in its own units."""


@dataclass(frozen=True)
class Bar:
    """One phase, drawn as a bar. `kind` determines the colour."""

    kind: str
    x: float
    width: float
    title: str


@dataclass(frozen=True)
class TimelineRow:
    """The bars of one row."""

    label: str
    bars: list[Bar]


@dataclass(frozen=True)
class Timeline:
    """A chart from `begin` to `end`."""

    begin: datetime
    end: datetime
    rows: list[TimelineRow]


def timeline(workload: WorkloadView, attempts: Sequence[AttemptView]) -> Timeline:
    """Returns the chart of a workload, with these attempts, oldest first."""
    begin = workload.submitted_at
    if attempts and attempts[0].attempt > 1:
        begin = attempts[0].awarded_at
    end = max(workload.finished_at or datetime.now(UTC), begin)
    whole_s = max(1.0, (end - begin).total_seconds())

    def bars(pieces: Iterator[tuple[str, datetime, datetime]]) -> list[Bar]:
        out = []
        for kind, since, until in pieces:
            x, last = (WIDTH * max(0.0, (at - begin).total_seconds()) / whole_s for at in (since, until))
            title = f"{kind}: {since.astimezone(UTC):%Y-%m-%d %H:%M:%S} to {until.astimezone(UTC):%H:%M:%S} UTC"
            out.append(Bar(kind, round(x, 2), round(max(1.0, last - x), 2), title))
        return out

    rows = [TimelineRow("Queue", bars(_waits(workload, attempts, begin, end)))]
    rows += [TimelineRow(f"Attempt {one.attempt}, {one.region}", bars(_phases(one, end))) for one in attempts]
    return Timeline(begin, end, rows)


def _waits(
    workload: WorkloadView, attempts: Sequence[AttemptView], begin: datetime, end: datetime
) -> Iterator[tuple[str, datetime, datetime]]:
    since: datetime | None = begin
    for one in attempts:
        if since is not None and one.awarded_at > since:
            yield "queued", since, one.awarded_at
        since = one.released_at
    # Between the release of the last attempt and the end of the workload are milliseconds, unless it was queued again.
    if since is not None and end > since + (timedelta() if workload.finished_at is None else timedelta(seconds=1)):
        yield "queued", since, end


def _phases(attempt: AttemptView, end: datetime) -> Iterator[tuple[str, datetime, datetime]]:
    last = attempt.released_at or end
    steps = [
        ("placing", attempt.awarded_at), ("starting", attempt.ready_at), ("running", attempt.started_at),
        ("saving", attempt.evicting_since),
    ]  # fmt: skip
    known = [(kind, min(at, last)) for kind, at in steps if at is not None]
    for number, (kind, since) in enumerate(known):
        until = known[number + 1][1] if number + 1 < len(known) else last
        if until > since:
            yield kind, since, until
