"""P3: classes, shares, the max-min spread, admission, and theorems 3 and 4 in simulated cases."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.traffic import TrafficClass
from reclaim.admission import AdmissionDecision, FlowOutcome, Flows, SpareSharing, decide
from reclaim.arrays import Floats, Ints
from reclaim.traffic import (
    UNLIMITED_BYTES_S,
    fill,
    least_rates,
    link_sums,
    migration_share,
    wire_bytes,
)
from research.reclaim.paths import links_bytes_s, paths
from tests.depth import examples
from tests.reclaim import campuses

SEEDS = st.integers(0, 2**32 - 1)


def test_classes() -> None:
    assert {c.value: c.dscp for c in TrafficClass} == {"planned": 34, "pre-sync": 8, "research": 0}


def test_share_leaves_the_larger_of_both_reservations() -> None:
    assert migration_share([1000.0, 1000.0, 1000.0], [0.0, 400.0, 2000.0]).tolist() == [700, 600, 0]
    assert migration_share(1000.0, 0.0, 0.4) == 600
    assert 0.69 * UNLIMITED_BYTES_S < migration_share(np.inf) <= UNLIMITED_BYTES_S
    with pytest.raises(ValueError, match=r"research_share: 1\.5: must be from 0 to 1"):
        migration_share(1.0, research_share=1.5)


def test_least_rate_is_above_the_exact_one() -> None:
    remaining = np.array([1000.0, 1000.0, 0.0, 1000.0])
    window = np.array([10.0, 3.0, -1.0, 0.0])
    assert least_rates(remaining, window).tolist() == [101, 334, 0, UNLIMITED_BYTES_S]
    assert wire_bytes(100) == 106


def plainly_filled(rates: Ints, limits: Ints, paths: Ints, share: Ints) -> list[int]:
    """Progressive filling, one byte per second at a time."""
    found, growing = rates.tolist(), set(range(len(rates)))
    users = [{f for f in growing if link in paths[f]} for link in range(len(share))]
    while growing := {f for f in growing if found[f] < limits[f]}:
        left = [most - sum(found[f] for f in on_it) for most, on_it in zip(share, users, strict=True)]
        full = [on_it for room, on_it in zip(left, users, strict=True) if room < len(on_it & growing)]
        growing = growing.difference(*full)
        if not full:
            for f in growing:
                found[f] += 1
    return found


@given(SEEDS)
@settings(max_examples=examples(300))
def test_spread_equals_progressive_filling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    flows, links = int(rng.integers(0, 7)), int(rng.integers(1, 5))
    paths = np.array([rng.permutation(np.where(rng.random(links) < 0.5, np.arange(links), -1)) for _ in range(flows)])
    paths = paths.reshape(flows, links).astype(np.int64)
    rates = rng.integers(0, 10, flows)
    limits = rates + rng.integers(0, 40, flows)
    share = link_sums(rates, paths, links) + rng.integers(0, 60, links)
    assert fill(rates, limits, paths, share).tolist() == plainly_filled(rates, limits, paths, share)


def one_link(*flows: tuple[float, float], rest_s: float = 0.0, limit: int = 10**9, admitted: int = 0) -> Flows:
    """Flows over one link, each given by bytes and deadline."""
    count = len(flows)
    remaining, deadline = (np.array(column, float) for column in zip(*flows, strict=True))
    return Flows(
        remaining,
        deadline,
        np.full(count, rest_s),
        np.full(count, limit),
        np.zeros((count, 1), np.int64),
        np.zeros(count),
        np.arange(count) < admitted,
    )


def outcomes(decision: AdmissionDecision) -> list[FlowOutcome]:
    return [FlowOutcome(o) for o in decision.outcome]


def test_all_are_admitted_if_their_sum_fits() -> None:
    found = decide(one_link((1000, 10), (1000, 20)), np.array([1000]), 0.0)
    assert outcomes(found) == [FlowOutcome.ADMITTED] * 2
    assert found.least_bytes_s.tolist() == [102, 52]


def test_rest_is_spread_in_equal_parts() -> None:
    """Of 1,000 bytes/s, the running flows need 101 and 51; each gets half of the other 848 up to its limit."""
    both = one_link((1000, 10), (1000, 20), admitted=2)
    assert decide(both, np.array([1000]), 0.0).rate_bytes_s.tolist() == [525, 475]
    capped = replace(both, limit_bytes_s=np.array([200, 10**9]))
    found = decide(capped, np.array([1000]), 0.0)
    assert found.rate_bytes_s.tolist() == [200, 800]
    assert found.left_bytes_s.tolist() == [0]


def test_completed_flow_gets_nothing() -> None:
    found = decide(one_link((0, 10), (1000, 20), admitted=2), np.array([1000]), 0.0)
    assert found.rate_bytes_s.tolist() == [0, 1000]


def test_rest_may_go_to_the_earliest_deadline() -> None:
    both = replace(one_link((1000, 20), (1000, 10), admitted=2), limit_bytes_s=np.array([10**9, 700]))
    found = decide(both, np.array([1000]), 0.0, spread=SpareSharing.DEADLINE)
    assert found.rate_bytes_s.tolist() == [300, 700]


def test_earliest_deadlines_first_if_the_sum_does_not_fit() -> None:
    """The second deadline is passed over, because it does not fit; the third needs less and fits."""
    found = decide(one_link((9000, 30), (1000, 10), (8000, 20)), np.array([450]), 0.0)
    assert outcomes(found) == [FlowOutcome.ADMITTED, FlowOutcome.ADMITTED, FlowOutcome.CROWDED]
    assert found.rate_bytes_s[2] == 0


def test_newcomer_does_not_displace_an_admitted_flow() -> None:
    found = decide(one_link((9000, 100), (1000, 10), admitted=1), np.array([150]), 0.0)
    assert outcomes(found) == [FlowOutcome.ADMITTED, FlowOutcome.CROWDED]


def test_headroom_is_closed_only_to_newcomers() -> None:
    for admitted, expected in ((0, FlowOutcome.CROWDED), (1, FlowOutcome.ADMITTED)):
        found = decide(one_link((960, 10), admitted=admitted), np.array([100]), 0.0, headroom_share=0.05)
        assert outcomes(found) == [expected]


def test_flows_that_cannot_make_it_are_told_apart() -> None:
    late = decide(one_link((1000, 10), rest_s=10.0), np.array([10**6]), 0.0)
    assert outcomes(late) == [FlowOutcome.NO_TIME]
    narrow = decide(one_link((1000, 10), limit=100), np.array([10**6]), 0.0)
    assert outcomes(narrow) == [FlowOutcome.TOO_NARROW]
    wide = decide(one_link((1000, 10)), np.array([90]), 0.0)
    assert outcomes(wide) == [FlowOutcome.TOO_NARROW]


def test_falling_bandwidth_squeezes_the_latest_deadline() -> None:
    """It gets what is left, a newcomer nothing. When the bandwidth recovers, it is admitted again."""
    flows = one_link((1000, 20), (1000, 10), (10, 100), admitted=2)
    found = decide(flows, np.array([110]), 0.0)
    assert outcomes(found) == [FlowOutcome.SQUEEZED, FlowOutcome.ADMITTED, FlowOutcome.CROWDED]
    assert found.rate_bytes_s.tolist() == [9, 101, 0]
    assert outcomes(decide(flows, np.array([1000]), 0.0)) == [FlowOutcome.ADMITTED] * 3


def test_flow_that_cannot_complete_takes_nothing_from_those_that_can() -> None:
    found = decide(one_link((5000, 10), (1000, 20), admitted=2), np.array([400]), 0.0)
    assert outcomes(found) == [FlowOutcome.SQUEEZED, FlowOutcome.ADMITTED]
    assert found.rate_bytes_s.tolist() == [349, 51]


def test_starts_are_staggered_as_far_as_deadlines_allow() -> None:
    """With ample bandwidth four flows start a quarter of the notice apart. Without any to spare all start at once."""
    flows = one_link(*[(1000, 40)] * 4)
    ample = decide(flows, np.array([10**6]), 0.0)
    assert ample.start_s.tolist() == [0, 10, 20, 30]
    assert (ample.rate_bytes_s > 0).tolist() == [True, False, False, False]
    scarce = decide(flows, np.array([4 * 27]), 0.0)
    assert scarce.start_s.tolist() == [0, 0, 0, 0]
    assert (scarce.rate_bytes_s == 27).all()


@given(SEEDS)
@settings(max_examples=examples(100))
def test_rounding_does_not_end_an_admission(seed: int) -> None:
    """A flow that runs at exactly the rate it was admitted for, on a link without any rest, stays admitted."""
    rng = np.random.default_rng(seed)
    size, deadline_s = float(rng.integers(10**6, 10**11)), float(rng.uniform(3, 600))
    flow = one_link((size, deadline_s), limit=10**12)
    share = decide(flow, np.array([10**12]), 0.0).least_bytes_s
    rate = decide(flow, share, 0.0).rate_bytes_s[0]
    assert rate == share[0]
    flow = replace(flow, is_admitted=np.array([True]))
    for now_s in np.sort(rng.uniform(0, deadline_s - 2, 30)):
        # Counters of bytes lag: what remains is rounded up.
        left = replace(flow, remaining_bytes=np.ceil(np.maximum(flow.remaining_bytes - rate * now_s, 0)))
        found = decide(left, share, now_s)
        assert outcomes(found) == [FlowOutcome.ADMITTED]
        assert found.rate_bytes_s[0] >= found.least_bytes_s[0]


def test_pre_sync_gets_what_migrations_leave() -> None:
    found = decide(one_link((4000, 10), limit=600, admitted=1), np.array([1000]), 0.0)
    assert found.left_bytes_s.tolist() == [400]
    background = np.zeros((2, 1), np.int64)
    rates = fill(np.zeros(2, np.int64), np.array([100, 10**6]), background, found.left_bytes_s)
    assert rates.tolist() == [100, 300]


class Campus:
    """Migrations over shared links in exact arithmetic. Decisions are made at arrivals, starts, ends and changes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        count, links = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        self.links = rng.integers(10**6, 10**8, links)
        self.bandwidth_falls = rng.random() < 0.5
        self.spread = rng.choice(list(SpareSharing))
        deadline_s = rng.uniform(1, 300, count)
        demand = rng.uniform(0.01, 0.6, count) * np.median(self.links) * 0.7
        self.arrival_s = rng.choice([0.0, 0.0, 7.5, 60.0, 133.3], count)
        self.flows = Flows(
            remaining_bytes=np.ceil(demand * deadline_s),
            deadline_s=self.arrival_s + deadline_s,
            rest_s=rng.uniform(-0.2, 0.3, count).clip(0) * deadline_s,
            limit_bytes_s=rng.choice([10**9, 2 * 10**7], count),
            paths=np.array([np.where(rng.random(links) < 0.6, np.arange(links), -1) for _ in range(count)]),
            start_s=np.zeros(count),
            is_admitted=np.zeros(count, bool),
        )
        self.remaining = [Fraction(int(b)) for b in self.flows.remaining_bytes]
        self.finished: dict[int, Fraction] = {}
        self.refused: dict[int, FlowOutcome] = {}
        self.squeezed: set[int] = set()

    def share(self, now_s: float) -> Ints:
        level = np.cos(now_s) if self.bandwidth_falls else 0.0
        return migration_share(self.links * (1 + 0.3 * level), 10**5)

    def run(self) -> None:
        now_s, changes = 0.0, np.arange(0.0, 450.0 if self.bandwidth_falls else 0.0, 29.0)
        while True:
            present = [f for f in np.flatnonzero(self.arrival_s <= now_s) if self._is_open(f)]
            rates = self._decide(np.array(present, int), now_s) if present else {}
            waiting = [self.flows.start_s[f] for f in rates if self.flows.start_s[f] > now_s]
            ends = [now_s + float(self.remaining[f] / r) for f, r in rates.items() if r]
            times = [*changes[changes > now_s], *self.arrival_s[self.arrival_s > now_s], *waiting, *ends]
            if not times:
                return
            then_s = max(min(times), np.nextafter(now_s, np.inf))
            for f, rate in rates.items():
                sent = rate * (Fraction(then_s) - Fraction(now_s))
                if rate and sent >= self.remaining[f]:
                    self.finished[f] = Fraction(now_s) + self.remaining[f] / rate
                self.remaining[f] = max(Fraction(0), self.remaining[f] - sent)
            now_s = then_s

    def _is_open(self, flow: int) -> bool:
        return flow not in self.finished and flow not in self.refused

    def _decide(self, at: Ints, now_s: float) -> dict[int, int]:
        """Decides for the flows `at`, checks theorem 4 and the least rates, and returns the rates of admitted flows."""
        remaining: Floats = np.array([float(self.remaining[f]) for f in at])
        picked = {name: getattr(self.flows, name)[at] for name in Flows.__dataclass_fields__}
        share = self.share(now_s)
        found = decide(Flows(**picked | {"remaining_bytes": remaining}), share, now_s, spread=self.spread)
        assert (link_sums(found.rate_bytes_s, picked["paths"], len(share)) <= share).all()
        assert (found.left_bytes_s >= 0).all()
        rates = {}
        for f, outcome, rate, least, start_s in zip(
            at, found.outcome, found.rate_bytes_s, found.least_bytes_s, found.start_s, strict=True
        ):
            if outcome == FlowOutcome.SQUEEZED:
                assert self.flows.is_admitted[f]
                self.squeezed.add(f)
            elif outcome != FlowOutcome.ADMITTED:
                assert rate == 0
                self.refused[f] = FlowOutcome(outcome)
                continue
            elif start_s <= now_s:
                assert rate >= least
            assert rate <= (self.flows.limit_bytes_s[f] if start_s <= now_s else 0)
            self.flows.is_admitted[f], self.flows.start_s[f] = True, start_s
            rates[int(f)] = int(rate)
        return rates


def test_theorems_3_and_4_in_simulated_cases() -> None:
    """Every admitted migration completes in time while others arrive, and no link carries more than its share.

    Half of the cases have a bandwidth that changes. There a flow may be squeezed, and only then.
    """
    cases = examples(10_000) if examples(100) >= 100 else 500
    completed = staggered = refused = squeezed = recovered = 0
    for seed in range(cases):
        campus = Campus(np.random.default_rng(seed))
        campus.run()
        flows = campus.flows
        for f in range(len(flows)):
            if f in campus.squeezed or (f in campus.refused and not flows.is_admitted[f]):
                continue
            assert campus.finished[f] <= Fraction(flows.deadline_s[f]) - Fraction(flows.rest_s[f]), f"case {seed}"
        assert campus.bandwidth_falls or not campus.squeezed, f"case {seed}"
        completed += len(campus.finished)
        staggered += int((flows.is_admitted & (flows.start_s > campus.arrival_s)).sum())
        refused += len(campus.refused)
        squeezed += len(campus.squeezed)
        recovered += len(campus.squeezed & campus.finished.keys())
    # The cases are not trivial.
    assert min(completed, staggered, refused) > cases / 2
    assert min(squeezed, recovered) > cases / 50


@given(SEEDS)
@settings(max_examples=examples(100))
def test_admission_holds_on_every_link_of_a_campus(seed: int) -> None:
    """On the paths of a random campus, no link exceeds its share, and a refused flow does not fit beside the others."""
    rng = np.random.default_rng(seed)
    topology = campuses.topology(rng, 12)
    count = int(rng.integers(1, 30))
    taken = paths(topology, rng.integers(0, 12, count), rng.integers(0, len(topology.building), count))
    share = migration_share(links_bytes_s(topology))
    flows = Flows(
        rng.uniform(1e6, 1e9, count),
        rng.uniform(5, 600, count),
        np.zeros(count),
        np.full(count, UNLIMITED_BYTES_S),
        taken,
        np.zeros(count),
        np.zeros(count, bool),
    )
    found = decide(flows, share, 0.0)
    admitted = found.outcome == FlowOutcome.ADMITTED
    promised = link_sums(np.where(admitted, found.least_bytes_s, 0), taken, len(share))
    assert (link_sums(found.rate_bytes_s, taken, len(share)) <= share).all()
    assert (promised <= share).all()
    for f in np.flatnonzero(~admitted):
        path = taken[f][taken[f] >= 0]
        assert (promised[path] + found.least_bytes_s[f] > share[path]).any()
