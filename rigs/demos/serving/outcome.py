"""The outcomes of the requests of a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rigs.demos.serving.load import Request

_REACTION_S = 1.0
"""A client learns within this time that the balancer, with which it had a connection, was killed."""


@dataclass(frozen=True)
class Outcome:
    """Counts and times of requests."""

    requests: int
    ok: int
    failed: tuple[Request, ...]
    """Requests without an answer. Those that were open in a killed balancer are not among them."""
    cut: int
    """Answers that broke off after their first byte. Those that were open in a killed balancer are not among them."""
    open_in_killed: int
    """Requests that were open in the balancer when it was killed, and did not succeed."""
    first_byte_s: tuple[float, float, float]
    """Median, 90th and 99th percentile of the time to the first byte."""

    @property
    def failed_share(self) -> float:
        """The fraction of requests that failed."""
        return len(self.failed) / self.requests


def read_outcome(file: Path, killed_s: Sequence[float]) -> Outcome:
    """Reads the file of the load. `killed_s`: when the balancer was killed, in seconds since the epoch."""
    requests = [Request(**json.loads(line)) for line in file.read_text().splitlines()]
    bad = [one for one in requests if one.outcome != "ok"]
    open_ = [one for one in bad if any(one.began_s <= at <= one.ended_s <= at + _REACTION_S for at in killed_s)]
    other = [one for one in bad if one not in open_]
    times = sorted(one.first_byte_s for one in requests if one.first_byte_s is not None)
    return Outcome(
        requests=len(requests),
        ok=len(requests) - len(bad),
        failed=tuple(one for one in other if one.outcome == "failed"),
        cut=sum(one.outcome == "cut" for one in other),
        open_in_killed=len(open_),
        first_byte_s=tuple(times[int(share * (len(times) - 1))] for share in (0.5, 0.9, 0.99)),  # type: ignore[arg-type]
    )
