"""The queueing model: against a plain second-by-second one, and on small examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.capacity import CapacityKind
from research.spot.latency import ServingSettings, measure_latency
from research.spot.policies import make_policy
from research.spot.queue_model import serve
from research.spot.replay import ReplaySettings, ReplicaSpan, replay_spans
from research.spot.requests import Requests
from research.spot.traces import SpotTrace
from services.spot.policies import PolicySettings
from tests.depth import examples
from tests.research.spot.plain_serving import PlainReplica, plain_serving
from tests.services.spot.strategies import traces, zones_of

_OUTCOMES = ("answered", "waiting", "running")


@st.composite
def replicas(draw: st.DrawFn) -> list[PlainReplica]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, 40))
        found.append(PlainReplica(start, start + draw(st.integers(1, 40)), draw(st.booleans())))
    return sorted(found, key=lambda one: one.from_s)


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 25)), max_size=25).map(sorted),
    replicas(),
    st.integers(1, 3),
    st.integers(1, 40),
)
def test_equals_the_plain_model(
    arrivals: list[tuple[int, int]], found: list[PlainReplica], concurrency: int, timeout_s: int
) -> None:
    """Each request has the same latency, the same end and the same interruptions."""
    to_s = np.array([one.to_s for one in found], dtype=np.float64)
    latency_s, outcome, interrupted = serve(
        np.array([at for at, _ in arrivals], dtype=np.float64),
        np.array([service for _, service in arrivals], dtype=np.float64),
        np.array([one.from_s for one in found], dtype=np.float64),
        to_s,
        np.argsort(to_s, kind="stable"),
        np.array([one.preempted for one in found], dtype=np.bool_),
        concurrency,
        float(timeout_s),
    )
    served = [
        (int(latency), _OUTCOMES[kind], int(count))
        for latency, kind, count in zip(latency_s, outcome, interrupted, strict=True)
    ]
    assert served == plain_serving(arrivals, found, concurrency, timeout_s)


def _span(number: int, ready_s: float | None, ended_s: float, *, preempted: bool = False) -> ReplicaSpan:
    return ReplicaSpan(number, CapacityKind.SPOT, "a", 0.0, ready_s, ended_s, preempted)


def _requests(*pairs: tuple[float, float]) -> Requests:
    return Requests(np.array([at for at, _ in pairs]), np.array([service for _, service in pairs]))


def test_an_interrupted_request_starts_again() -> None:
    """The time before the interruption is lost; a request without a replica fails at its timeout."""
    requests = _requests((0.0, 10.0), (1.0, 10.0))
    spans = [_span(0, 0.0, 5.0, preempted=True), _span(1, 7.0, 100.0)]
    found, failed_s = measure_latency(requests, spans, 100.0, ServingSettings(1, 30.0))
    # The first request runs from 0 to 5 and from 7 to 17, the second one from 17 to 27.
    assert (found.requests, found.interrupted, found.failed_share, failed_s) == (2, 1, 0.0, ())
    assert found.p50_s == pytest.approx((17 + 26) / 2)
    found, failed_s = measure_latency(requests, spans, 100.0, ServingSettings(1, 20.0))
    assert (found.failed_waiting, found.failed_running, failed_s) == (0, 1, (1.0,))
    assert found.p99_s == pytest.approx(20, abs=0.1)
    found, failed_s = measure_latency(requests, spans[:1], 100.0, ServingSettings(1, 20.0))
    assert (found.failed_waiting, found.failed_running, found.interrupted, failed_s) == (2, 0, 1, (0.0, 1.0))


def test_a_replica_that_the_policy_ends_finishes_its_requests() -> None:
    """It takes no new ones; a replica of the window's end keeps serving; one that was never ready serves nothing."""
    requests = _requests((4.0, 10.0), (6.0, 10.0))
    ended = [_span(0, 0.0, 5.0)]
    found, _ = measure_latency(requests, ended, 100.0, ServingSettings(4, 30.0))
    assert (found.failed_waiting, found.interrupted, found.p50_s) == (1, 0, pytest.approx(20))
    found, _ = measure_latency(requests, ended, 5.0, ServingSettings(4, 30.0))
    assert (found.failed_share, found.p99_s) == (0.0, pytest.approx(10))
    found, _ = measure_latency(requests, [_span(0, None, 100.0), _span(1, 9.0, 9.0)], 100.0, ServingSettings(4, 30.0))
    assert found.failed_share == 1.0


def test_a_window_without_requests() -> None:
    """There are no percentiles, and no failures."""
    found, _ = measure_latency(_requests(), [_span(0, 0.0, 10.0)], 10.0, ServingSettings())
    assert (found.requests, found.p50_s, found.p99_s, found.failed_share) == (0, None, None, None)


@settings(max_examples=50)
@given(traces(), st.integers(0, 45), st.integers(1, 4), st.sampled_from(["spothedge", "round-robin", "mark-like"]))
def test_spans_have_the_replay_s_figures(trace: SpotTrace, cold_s: int, target: int, name: str) -> None:
    """Availability, cost, launches and preemptions can be computed from the spans alone."""
    rules = ReplaySettings(target, float(cold_s), 3.0)
    policy = make_policy(name, PolicySettings(trace.zones, 1, retry_s=trace.gap_s))
    result, spans = replay_spans(trace, policy, rules, 0, trace.ticks)
    whole_s = int(trace.ticks * trace.gap_s)
    assert len({one.number for one in spans}) == len(spans) == result.launches
    assert sum(one.preempted for one in spans) == result.preemptions
    price = {CapacityKind.SPOT: 1.0, CapacityKind.ON_DEMAND: 3.0}
    paid = sum(price[one.kind] * (one.ended_s - one.launched_s) for one in spans)
    assert result.cost == pytest.approx(paid / (3 * target * whole_s))
    good = sum(
        sum(one.ready_s is not None and one.ready_s <= at < one.ended_s for one in spans) >= target
        for at in range(whole_s)
    )
    assert result.availability == pytest.approx(good / whole_s)


def test_a_span_says_how_it_ended() -> None:
    """A lost replica is preempted; one that is there at the end of the window is not. A refused launch has a number."""
    trace = SpotTrace(zones_of(1), 100.0, ((1, 0, 1),))
    policy = make_policy("round-robin", PolicySettings(trace.zones, retry_s=100.0))
    _, spans = replay_spans(trace, policy, ReplaySettings(1, 40.0, 3.0), 0, 3)
    zone = trace.zones[0].name
    assert spans == (
        ReplicaSpan(0, CapacityKind.SPOT, zone, 0.0, 40.0, 100.0, preempted=True),
        ReplicaSpan(2, CapacityKind.SPOT, zone, 200.0, 240.0, 300.0, preempted=False),
    )
