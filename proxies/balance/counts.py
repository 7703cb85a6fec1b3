"""Counts of requests by second, from HAProxy's log and its counter of requests.

HAProxy writes one short line to a pipe when a request has ended. A pipe costs less than a datagram for each line: its
reader is not woken up, and reads thousands of lines at a time. Arrivals come from HAProxy's own counter instead,
because a stream's line is written only at its end, and the autoscaler must see the stream when it begins.
"""

import contextlib
import csv
import fcntl
import io
import os
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from proxies.balance.configuration import PLUG
from proxies.balance.outliers import RECENT, ServerCounts
from proxies.balance.values import Canary

READ_S = 0.25
"""Interval of the reads. The pipe holds 50,000 lines or more; HAProxy drops lines that do not fit."""
_PIPE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_NO_OWNER = [b"-"]
"""The request had no key that is admitted, or the key has no named owner."""
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class CanarySecond:
    """The requests that ended in one second while a version is judged. The fields are those of the API."""

    version: int
    answered: int
    """Complete answers of the canary with a status below 500."""
    failed: int
    """Other answers of the canary, and requests that it did not answer. Each retry of a request counts."""
    slow: int
    """The answers that took longer than the limit."""
    others_answered: int
    others_failed: int


@dataclass(frozen=True)
class Second:
    """The requests of one second. Those that `failed` or were `cut` ended in it; `requests` began in it."""

    second: int
    """Seconds since 1970."""
    requests: int
    failed: int
    """Answered with a status of 500 or above, or not at all."""
    cut: int
    """Answers that broke off after their first byte, not by the client."""
    p50_s: float | None
    """Median of the total time of the answered requests; None: there are none."""
    p99_s: float | None
    canary: CanarySecond | None = None
    """None: no version is judged, or no request ended."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object that the API expects."""
        return {
            "second": self.second, "requests": self.requests, "failed": self.failed, "cut": self.cut,
            "p50_s": self.p50_s, "p99_s": self.p99_s, "canary": None if self.canary is None else asdict(self.canary),
        }  # fmt: skip

    @property
    def is_empty(self) -> bool:
        """Whether no request began or ended."""
        return self.p50_s is None and not (self.requests or self.failed or self.cut)


@dataclass
class Totals:
    """Counts since the start, for metrics."""

    requests: int = 0
    answered: int = 0
    failed: int = 0
    cut: int = 0
    retries: int = 0
    seconds: float = 0.0
    """Sum of the total times of the answered requests."""
    by_owner: Counter[str] = field(default_factory=Counter)
    """The number of requests that ended, by the owner of their key."""
    at_most: list[int] = field(default_factory=lambda: [0] * len(BUCKETS_S))
    """The number of answered requests that took at most each of `BUCKETS_S`."""


class RequestCounter:
    """Reads the log of one service's HAProxy processes, and returns the counts of each second."""

    def __init__(self) -> None:
        self._reading, self.log = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """`log` is the descriptor that HAProxy inherits. The pipe outlives a HAProxy that dies."""
        with contextlib.suppress(OSError):  # The system allows less: the default size holds 3,000 lines.
            fcntl.fcntl(self.log, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.totals = Totals()
        self._rest = b""
        self._requests = self._failed = self._cut = self._retries = 0
        self._times_ms: list[int] = []
        self._canary_ms: list[int] = []
        self._canary_failed = 0
        self._first_bytes_ms: defaultdict[bytes, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT))

    def read(self) -> None:
        """Reads the lines that are in the pipe."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._reading, _CHUNK_BYTES):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                self._take(lines)

    def _take(self, lines: list[bytes]) -> None:
        times_ms, retries = self._times_ms, 0
        for line in lines:
            try:
                status, ended, time_ms, tries, canary, server, first_byte_ms, *owner = line.split(b" ")
                if tries != b"0":
                    again = int(tries.lstrip(b"+"))
                    retries += again
                    self._canary_failed += again if canary != b"-" else 0
                if owner and owner != _NO_OWNER:
                    self.totals.by_owner[owner[0].decode()] += 1
                if ended == b"--" and b"100" < status < b"500":
                    if status != b"101":  # The time of a websocket is not that of an answer.
                        times_ms.append(int(time_ms))
                        self._first_bytes_ms[server].append(int(first_byte_ms))
                        if canary != b"-":
                            self._canary_ms.append(int(time_ms))
                    continue
                code = int(status)
            except ValueError:
                continue  # A message of HAProxy itself, such as the stop of a proxy.
            by_client = ended[:1] in (b"C", b"c")
            if code >= 500 or (code < 100 and not by_client):
                self._failed += 1
            elif ended[1:] == b"D" and ended[:1] != b"-" and not by_client:
                self._cut += 1
            else:
                continue
            self._canary_failed += canary != b"-"
        self._retries += retries

    def take_first_bytes(self) -> dict[str, list[float]]:
        """Returns, for the answers since the last call, the seconds from the request to the first byte.

        By the name of the server; only complete answers with a status below 500.
        """
        taken, self._first_bytes_ms = self._first_bytes_ms, defaultdict(self._first_bytes_ms.default_factory)
        return {server.decode(): [one / 1000 for one in times_ms] for server, times_ms in taken.items()}

    def add(self, requests: int, unanswered: int) -> None:
        """Adds requests that have begun, and requests that failed without a line in the log."""
        self._requests += requests
        self._failed += unanswered

    def close(self, second: int, canary: Canary | None = None) -> Second:
        """Returns the counts since the last call. `canary`: the version on trial; None: there is none."""
        times = sorted(self._times_ms)
        found = Second(
            second, self._requests, self._failed, self._cut, _percentile_s(times, 50), _percentile_s(times, 99),
            None if canary is None else self._close_canary(canary),
        )  # fmt: skip
        totals = self.totals
        totals.requests += self._requests
        totals.answered += len(times)
        totals.failed += self._failed
        totals.cut += self._cut
        totals.retries += self._retries
        totals.seconds += sum(times) / 1000
        for number, most_s in enumerate(BUCKETS_S):
            totals.at_most[number] += bisect_right(times, most_s * 1000)
        self._requests = self._failed = self._cut = self._retries = 0
        self._times_ms = []
        self._canary_ms = []
        self._canary_failed = 0
        return found

    def _close_canary(self, canary: Canary) -> CanarySecond | None:
        failed = self._failed + self._cut + self._retries
        if not failed and not self._times_ms:
            return None
        own, own_failed = self._canary_ms, self._canary_failed
        slow = 0 if canary.slow_s is None else sum(one > 1000 * canary.slow_s for one in own)
        others = len(self._times_ms) - len(own), failed - own_failed
        return CanarySecond(canary.version, len(own), own_failed, slow, *others)


def _percentile_s(sorted_ms: list[int], percent: int) -> float | None:
    """Returns the percentile by nearest rank: the least value that is at least `percent` % of all values."""
    return sorted_ms[-(-len(sorted_ms) * percent // 100) - 1] / 1000 if sorted_ms else None


Rows = list[dict[str, str]]
_COLUMNS = (
    "pxname", "svname", "scur", "qcur", "req_tot", "dreq", "eresp", "wretr",
    "hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other",
)  # fmt: skip
STATISTICS = "show stat -1 7 -1"
"""The command for the counters of frontends, backends and servers."""


def read_rows(answer: str) -> Rows:
    """Returns the rows of the answer to `STATISTICS`, with the columns that are used here."""
    lines = csv.reader(io.StringIO(answer.removeprefix("# ")))
    header = next(lines)
    places = [(name, header.index(name)) for name in _COLUMNS]
    return [{name: line[place] for name, place in places} for line in lines if line]


def server_counts(rows: Rows) -> dict[str, ServerCounts]:
    """Returns the counts of each replica by the name of its servers, as sums over the backends."""
    found: dict[str, ServerCounts] = {}
    for row in rows:
        name = row["svname"]
        if name in ("FRONTEND", "BACKEND", PLUG):
            continue
        counts = ServerCounts(
            answered=_sum(row, ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_other")),
            failed=_sum(row, ("hrsp_5xx", "eresp", "wretr")),
            active=int(row["scur"]),
        )
        found[name] = found[name] + counts if name in found else counts
    return found


def held_requests(rows: Rows) -> int:
    """Returns the number of requests that wait because no replica is up."""
    return sum(int(row["qcur"]) for row in rows if (row["pxname"], row["svname"]) == ("hold", "BACKEND"))


def _sum(row: dict[str, str], columns: Iterable[str]) -> int:
    return sum(int(row[one]) for one in columns)


class Counters:
    """The counters of one HAProxy process."""

    def __init__(self) -> None:
        self._requests = 0
        self._unanswered = 0
        self._unconfirmed = 0
        self.running = 0
        """Requests in progress at the last reading."""

    def new(self, rows: Rows) -> tuple[int, int]:
        """Returns two numbers since the last call: admitted requests, and requests whose client got nothing.

        If a replica dies during a request on a connection that had served one before, and the request cannot be
        repeated, HAProxy closes the client's connection without an answer, and writes no log line.
        """
        frontend = next(row for row in rows if (row["pxname"], row["svname"]) == ("service", "FRONTEND"))
        plugged = sum(int(row["scur"]) for row in rows if row["svname"] == PLUG)
        self.running = sum(int(row["scur"]) for row in rows if row["svname"] == "BACKEND") - plugged
        ended = _sum(frontend, ("hrsp_1xx", "hrsp_2xx", "hrsp_3xx", "hrsp_4xx", "hrsp_5xx", "hrsp_other"))
        # The counters change while several threads are read. Only a value that stays for two readings counts.
        missing = int(frontend["req_tot"]) - ended - self.running
        unanswered = max(self._unanswered, min(self._unconfirmed, missing))
        requests = int(frontend["req_tot"]) - int(frontend["dreq"])
        found = requests - self._requests, unanswered - self._unanswered
        self._requests, self._unanswered, self._unconfirmed = requests, unanswered, missing
        return found
