"""The autoscaler against an oracle: replica hours, and requests in time, on a trace of requests to a language model.

    python -m bench.scaling_oracle --data ../shared/data

Each trace is played twice, and the second time is measured, so that no run begins with a cold start. Ours is the
controller of live services (`bench.scaled_fleet.LiveScaler`). The oracle knows all requests in advance, and launches
its replicas a cold start before they are needed. Its plan sets a number of replicas for each slot of time, with 99 % of
the requests in time. The search removes first the replicas whose removal makes the fewest requests late. A plan with
fewer hours may exist, so the ratio to the true optimum may be higher; the work of all requests is a lower bound on the
hours of any plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path

import click
import numpy as np

from bench.scaled_fleet import SLOTS, FleetRun, LiveScaler, PlannedScaler, run_fleet
from infra.reports.tables import ReportTable
from research.spot.request_files import RateForm, TokenForm, read_rates, read_tokens
from research.spot.requests import Requests, TokenRequests
from services.spot.autoscaler import LoadAutoscaler

SHARE = 0.99
"""The share of the requests that are in time: at most `BOUND` times the time that a request takes alone."""
COLD_STARTS_S = (60.0, 180.0)
HOURS_BAR, CHANGES_BAR = 1.25, 2.0
"""The most replica hours, and changes an hour, in those of the oracle."""
ONGOING, UP_S, DOWN_S = 6.5, 60.0, 900.0
"""The document of the service: `target_ongoing_requests`, four fifths of what a replica answers at a time, and the
delays."""
_DAY_S = 86400.0
_SLOT_S = 300.0
_MOST_ABOVE = 5
"""Plans have at most so many replicas more than the work of a slot needs."""


@dataclass(frozen=True)
class ScalingTrace:
    """Requests that are played twice."""

    name: str
    requests: Requests
    length_s: float
    """The length of one of the two times."""

    @property
    def first(self) -> int:
        """The first request that is measured."""
        return len(self.requests.arrival_s) // 2

    def run(self, scaler: LiveScaler | PlannedScaler, cold_start_s: float) -> FleetRun:
        """Plays the trace twice."""
        return run_fleet(self.requests, scaler, cold_start_s, 2 * self.length_s)

    def hours(self, run: FleetRun) -> float:
        """Returns the replica hours of the second time."""
        return run.fleet.hours(self.length_s, 2 * self.length_s)

    def changes_per_h(self, run: FleetRun) -> float:
        """Returns the launches and drains in an hour of the second time."""
        return run.changes_per_h(self.length_s, 2 * self.length_s)

    @property
    def least_hours(self) -> float:
        """The replica hours of the work itself, if no slot of a replica is ever idle."""
        return float(self.requests.service_s[self.first :].sum()) / SLOTS / 3600


def conversations(data: Path) -> ScalingTrace:
    """Returns the trace of conversations as recorded."""
    source = _tokens(data)
    return ScalingTrace(
        "conversations, an hour", _twice(source.arrival_s, source.service_s, source.length_s), source.length_s
    )


def day(data: Path) -> ScalingTrace:
    """Returns a day with the rates of `request-rate`, scaled to the mean of the conversations, and their tokens."""
    source = _tokens(data)
    mean_per_min = 60 * len(source.arrival_s) / source.length_s
    plain = read_rates(data / "request-rate" / "maf1_cleaned.csv", RateForm(1.0, inf))
    scale = mean_per_min / (plain.expected(_DAY_S) / (_DAY_S / 60))
    rates = read_rates(data / "request-rate" / "maf1_cleaned.csv", RateForm(scale, inf))
    drawn = rates.draw(0.0, _DAY_S, "day")
    service_s = np.random.default_rng(0).choice(source.service_s, len(drawn.arrival_s))
    return ScalingTrace("a day", _twice(drawn.arrival_s, service_s, _DAY_S), _DAY_S)


def _tokens(data: Path) -> TokenRequests:
    source = read_tokens(data / "llm-requests" / "AzureLLMInferenceTrace_conv.csv", TokenForm())
    assert isinstance(source, TokenRequests)
    return source


def _twice(arrival_s: np.ndarray, service_s: np.ndarray, length_s: float) -> Requests:
    return Requests(np.concatenate([arrival_s, arrival_s + length_s]), np.tile(service_s, 2))


def oracle(trace: ScalingTrace, cold_start_s: float) -> tuple[int, ...]:
    """Returns the number of replicas in each slot of the cheapest plan that was found.

    The plans with the same number of replicas above the work of each slot are played first. Then slots get fewer
    replicas, those first that lose the fewest requests for it, until no more requests may be late.
    """
    base = _work(trace)
    slots = len(base)
    late = np.array([_late(trace, [one + above for one in base], cold_start_s) for above in range(_MOST_ABOVE + 1)])
    allowed = (1 - SHARE) * len(trace.requests.arrival_s)
    above = np.full(slots, _MOST_ABOVE)
    spent = float(late[_MOST_ABOVE].sum())
    for _ in range(slots * _MOST_ABOVE):
        more = np.where(above > 0, late[above - 1, range(slots)] - late[above, range(slots)], inf)
        at = int(np.argmin(more))
        if spent + more[at] > allowed:
            break
        spent += float(more[at])
        above[at] -= 1
    plan = [one + int(extra) for one, extra in zip(base, above, strict=True)]
    # What a slot loses depends on those before it, so the plan may miss the share by a little.
    while trace.run(PlannedScaler(plan, _SLOT_S), cold_start_s).share(trace.first) < SHARE:
        worst = int(np.argmax(_late(trace, plan, cold_start_s)))
        plan[worst] += 1
    return tuple(plan)


def _work(trace: ScalingTrace) -> list[int]:
    """Returns the replicas that the work of each slot needs, rounded up."""
    slots = ceil(2 * trace.length_s / _SLOT_S)
    at = (trace.requests.arrival_s / _SLOT_S).astype(int)
    work_s = np.bincount(at, weights=trace.requests.service_s, minlength=slots)
    return [max(1, ceil(one / _SLOT_S / SLOTS)) for one in work_s]


def _late(trace: ScalingTrace, plan: Sequence[int], cold_start_s: float) -> np.ndarray:
    """Returns the number of late requests of each slot."""
    run = trace.run(PlannedScaler(plan, _SLOT_S), cold_start_s)
    at = (trace.requests.arrival_s / _SLOT_S).astype(int)
    return np.bincount(at, weights=np.array(run.late, dtype=float), minlength=len(plan))


def ours(most: int = 100) -> LiveScaler:
    """Returns the live scaler with the document of the benchmark."""
    return LiveScaler(
        LoadAutoscaler(inf, least=1, most=most, upscale_delay_s=UP_S, downscale_delay_s=DOWN_S, ongoing=ONGOING)
    )


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="The folder with the traces.")
def main(data: Path) -> None:
    """Compare the autoscaler with an oracle."""
    rows = []
    for trace in (conversations(data), day(data)):
        for cold_s in COLD_STARTS_S:
            best = trace.run(PlannedScaler(oracle(trace, cold_s), _SLOT_S), cold_s)
            own = trace.run(ours(), cold_s)
            rows.append([
                trace.name, f"{cold_s:g}",
                f"{100 * own.share(trace.first):.2f}", f"{100 * best.share(trace.first):.2f}",
                f"{trace.hours(own):.2f}", f"{trace.hours(best):.2f}", f"{trace.least_hours:.2f}",
                f"{trace.hours(own) / trace.hours(best):.2f}",
                f"{trace.changes_per_h(own):.1f}", f"{trace.changes_per_h(best):.1f}",
            ])  # fmt: skip
    columns = (
        "TRACE",
        "COLD START S",
        "IN TIME %",
        "ORACLE",
        "HOURS",
        "ORACLE",
        "WORK",
        "RATIO",
        "CHANGES/H",
        "ORACLE",
    )
    note = f"bars: {100 * SHARE:g} % in time; of the oracle's hours {HOURS_BAR:g}, of its changes {CHANGES_BAR:g}"
    click.echo(str(ReportTable(columns, rows, note)))


if __name__ == "__main__":
    main()
