"""Which replicas get no requests because they fail more often than the others, or do not answer. Pure.

A replica is ejected after several requests in a row have failed, if far more of its requests fail than of the others',
if its answers take far longer, or if a request waits too long for the first byte of its answer. After a pause it is
tried again with few requests; if one of them fails, it is ejected again, for twice as long. At most half of the
replicas are ejected at a time, and none while the others fail as often: then the requests, or something behind all
replicas, are to blame.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean, median

IN_A_ROW = 3
"""A replica is ejected after this many failed requests without a successful one in between."""
WINDOW_S = 30.0
_LEAST_ANSWERS = 20
_LEAST_SHARE = 0.1
_TIMES_THE_OTHERS = 3.0
_DEVIATIONS = 5.0
"""Number of standard deviations by which a replica's failures must exceed those expected from the other replicas."""
_TRIAL_ANSWERS = 3
"""A replica on trial is admitted after this many answers without a failure."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 300.0
_LEAST_WAIT_S = 2.0
_TIMES_THE_MEAN = 20.0
"""Without a limit in the service's document, a request waits too long after 2 s, and after 20 times the mean time to
the first byte of another replica."""
RECENT = 64
"""Number of recent answers per replica whose times to the first byte are kept."""
_LEAST_TIMES = 5
_TIMES_THE_MEDIAN = 10.0
_LEAST_SLOW_S = 0.25
"""Without such a limit, a replica is too slow if the median time to the first byte of its last answers, at least 5, is
more than 0.25 s, and more than 10 times the median of the others' medians."""


@dataclass(frozen=True)
class ServerCounts:
    """The counts of HAProxy for one replica since HAProxy was started."""

    answered: int
    """Answers with a status below 500."""
    failed: int
    """Answers with a status of 500 or above, requests without an answer, and requests repeated on another replica."""
    active: int = 0
    """Requests in progress."""

    def __add__(self, other: "ServerCounts") -> "ServerCounts":
        return ServerCounts(
            self.answered + other.answered,
            self.failed + other.failed,
            self.active + other.active,
        )


class OutlierChange(StrEnum):
    """What the outlier detection decided for a replica."""

    EJECTED = "ejected"
    """It gets no new requests."""
    TRIED = "tried"
    """It gets few requests."""
    ADMITTED = "admitted"
    """It gets requests as before."""


@dataclass
class Ejection:
    """A replica that is ejected or tried."""

    why: str
    since_s: float
    """The time of the first ejection since the replica worked."""
    until_s: float
    """The end of the pause."""
    pause_s: float
    is_trial: bool = False
    answers: int = 0
    """Answers since the trial began."""


@dataclass
class _Record:
    last: ServerCounts
    window: deque[tuple[float, int, int]] = field(default_factory=deque)
    """Time, answers and failures of the last `WINDOW_S` seconds."""
    answered: int = 0
    """The sum of the answers in `window`; the next field is the sum of the failures."""
    failed: int = 0
    in_a_row: int = 0
    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The times to the first byte of the last answers; during a trial, only of the answers since its start."""
    ejection: Ejection | None = None

    def take(self, counts: ServerCounts, now_s: float) -> tuple[int, int]:
        """Stores the current counts. Returns the answers and failures since the previous call."""
        before, self.last = self.last, counts
        answered, failed = max(0, counts.answered - before.answered), max(0, counts.failed - before.failed)
        if answered or failed:
            self.window.append((now_s, answered, failed))
            self.answered, self.failed = self.answered + answered, self.failed + failed
            self.in_a_row = 0 if answered else self.in_a_row + failed
        while self.window and self.window[0][0] <= now_s - WINDOW_S:
            _, old_answered, old_failed = self.window.popleft()
            self.answered, self.failed = self.answered - old_answered, self.failed - old_failed
        return answered, failed


class Outliers:
    """The replicas of one service. Times are seconds of any clock that only runs forward."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    @property
    def ejections(self) -> dict[str, Ejection]:
        """The replicas that are ejected or tried, by name."""
        return {name: one.ejection for name, one in self._records.items() if one.ejection is not None}

    def restarted(self) -> None:
        """Resets the counts, because those of another HAProxy process begin at zero. Ejections stay."""
        for one in self._records.values():
            one.last = ServerCounts(0, 0)

    def observe(
        self,
        counts: Mapping[str, ServerCounts],
        waits_s: Mapping[str, float],
        limit_s: float | None,
        now_s: float,
        first_bytes_s: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, OutlierChange]:
        """Returns the decisions, by the name of the replica.

        Args:
            counts: the current counts of all replicas that may get requests.
            waits_s: for replicas with requests in progress: the longest time for which one has waited for the first
                byte of its answer.
            limit_s: the longest such time according to the service's document; None: relative to the others.
            now_s: the current time.
            first_bytes_s: the times to the first byte of the answers since the last call; None: not known.
        """
        verdicts: dict[str, OutlierChange] = {}
        for name in self._records.keys() - counts.keys():
            del self._records[name]
        for name, one in counts.items():
            record = self._records.setdefault(name, _Record(one))
            answered, failed = record.take(one, now_s)
            record.times_s.extend((first_bytes_s or {}).get(name, ()))
            if record.ejection is not None:
                overdue = self._overdue(name, waits_s, limit_s) or self._slow(name, limit_s, least=1)
                _follow(name, record.ejection, answered, failed, overdue, now_s, verdicts)
                if verdicts.get(name) is OutlierChange.ADMITTED:
                    self._records[name] = _Record(one)
                elif not record.ejection.is_trial or name in verdicts:
                    record.times_s.clear()  # Answers to requests that were sent before the trial say nothing about it.
        for name, why in self._worst_first(waits_s, limit_s):
            if self._ejected() < len(self._records) // 2:
                record = self._records[name]
                record.ejection = Ejection(why, now_s, now_s + _FIRST_PAUSE_S, _FIRST_PAUSE_S)
                record.in_a_row = 0
                verdicts[name] = OutlierChange.EJECTED
        self._keep_half(verdicts)
        return verdicts

    def _ejected(self) -> int:
        return sum(not one.is_trial for one in self.ejections.values())

    def _keep_half(self, verdicts: dict[str, OutlierChange]) -> None:
        """If more than half of the replicas are ejected, since others have ended, puts those ejected first on trial."""
        paused = sorted((one.since_s, name) for name, one in self.ejections.items() if not one.is_trial)
        for _, name in paused[: max(0, len(paused) - len(self._records) // 2)]:
            self.ejections[name].is_trial, self.ejections[name].answers = True, 0
            verdicts[name] = OutlierChange.TRIED

    def _worst_first(self, waits_s: Mapping[str, float], limit_s: float | None) -> Iterable[tuple[str, str]]:
        """Returns the replicas that should be ejected, each with the reason."""
        found = []
        for name, record in self._records.items():
            if record.ejection is None:
                why = self._failing(name, record) or self._overdue(name, waits_s, limit_s)
                why = why or self._slow(name, limit_s, _LEAST_TIMES)
                if why:
                    found.append((-record.failed, name, why))
        return [(name, why) for _, name, why in sorted(found)]

    def _failing(self, name: str, record: _Record) -> str:
        """Returns why the failures of a replica stand out; empty: they do not."""
        others = [one for other, one in self._records.items() if other != name]
        failed, answered = sum(one.failed for one in others), sum(one.answered for one in others)
        total = record.answered + record.failed
        share, usual = record.failed / max(1, total), failed / max(1, failed + answered)
        if share <= _TIMES_THE_OTHERS * usual:
            return ""
        compared = f"{failed} of {failed + answered} requests to the others"
        if record.in_a_row >= IN_A_ROW:
            return f"the last {record.in_a_row} requests failed; {compared}"
        expected = max(usual, 0.01)
        most = total * expected + _DEVIATIONS * math.sqrt(total * expected * (1 - expected))
        if total >= _LEAST_ANSWERS and share >= _LEAST_SHARE and record.failed > most:
            return f"{record.failed} of {total} requests failed in {WINDOW_S:g} s; {compared}"
        return ""

    def _others(self, name: str) -> dict[str, _Record]:
        return {other: one for other, one in self._records.items() if other != name and one.ejection is None}

    def _slow(self, name: str, limit_s: float | None, least: int) -> str:
        """Returns why at least `least` answers of a replica took far longer than the others'; empty: they did not."""
        own = self._records[name].times_s
        if limit_s is not None or len(own) < least or (own_s := median(own)) <= _LEAST_SLOW_S:
            return ""
        # As many answers of each: if all replicas become slow, one that has few answers is not slower than the others.
        last = max(_LEAST_TIMES, len(own))
        others = [one.times_s for one in self._others(name).values() if len(one.times_s) >= _LEAST_TIMES]
        others_s = [median(list(times_s)[-last:]) for times_s in others]
        if not others_s or own_s <= _TIMES_THE_MEDIAN * median(others_s):
            return ""
        return f"the median time to the first byte is {own_s:.3g} s, that of the others {median(others_s):.3g} s"

    def _overdue(self, name: str, waits_s: Mapping[str, float], limit_s: float | None) -> str:
        """Returns why a replica counts as hung; empty: it does not, or all others have such requests, too."""
        wait_s, others = waits_s.get(name, 0.0), self._others(name)
        if limit_s is None:
            if wait_s < _LEAST_WAIT_S:
                return ""
            slowest_s = max((fmean(one.times_s) for one in others.values() if one.times_s), default=None)
            if slowest_s is None:
                return ""  # The time of an answer is unknown.
            limit_s = max(_LEAST_WAIT_S, _TIMES_THE_MEAN * slowest_s)
            source = f"the others need {slowest_s:.3g} s on average"
        else:
            source = "the limit of the service"
        if wait_s < limit_s or (others and all(waits_s.get(other, 0.0) >= limit_s for other in others)):
            return ""
        return f"a request has waited {wait_s:.1f} s for the first byte, more than {limit_s:.3g} s ({source})"


def _follow(
    name: str,
    ejection: Ejection,
    answered: int,
    failed: int,
    overdue: str,
    now_s: float,
    verdicts: dict[str, OutlierChange],
) -> None:
    """Updates the state of a replica that is ejected or on trial."""
    if not ejection.is_trial:
        if now_s >= ejection.until_s and overdue:
            ejection.until_s = now_s + ejection.pause_s  # A trial would only add more requests that wait.
        elif now_s >= ejection.until_s:
            ejection.is_trial, ejection.answers = True, 0
            verdicts[name] = OutlierChange.TRIED
    elif failed or overdue:
        ejection.is_trial = False
        ejection.why = overdue or ejection.why
        ejection.pause_s = min(_LONGEST_PAUSE_S, 2 * ejection.pause_s)
        ejection.until_s = now_s + ejection.pause_s
        verdicts[name] = OutlierChange.EJECTED
    else:
        ejection.answers += answered
        if ejection.answers >= _TRIAL_ANSWERS:
            verdicts[name] = OutlierChange.ADMITTED
