"""Interval and destination together, and early moves, against a scalar model that is minimised numerically."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.buildings import Rules
from research.reclaim.algorithm_2 import Nodes, choose
from research.reclaim.destinations import Leaving, Network
from research.reclaim.joint import DAY_S, EarlyMoves, Outlook, Policy, choose_jointly, early_moves
from research.reclaim.topology import NOWHERE, Links, Topology
from tests.depth import examples
from tests.reclaim import campuses

SEEDS = st.integers(0, 2**32 - 1)


def losses(
    outlook: Outlook, leaving: Leaving, job: int, node: int, next_s: float, interval_s: np.ndarray
) -> np.ndarray:
    """The expected loss in seconds at some intervals, as in the docstring of `research.reclaim.joint`."""
    again_s = outlook.emergencies[job, node] * (interval_s / 2 + next_s) + outlook.notices[job, node] * next_s
    saves = outlook.horizon_s[job] / interval_s
    return again_s + saves * leaving.checkpoint_bytes[job] / outlook.write_bytes_s[node]


def least_loss(
    outlook: Outlook, leaving: Leaving, job: int, node: int, next_s: float, write_share: float = 0.2
) -> tuple[float, float]:
    """Returns the least loss over the permitted intervals and its interval, by a search in a shrinking grid."""
    shortest_s = leaving.checkpoint_bytes[job] / (write_share * outlook.write_bytes_s[node])
    low, high = shortest_s, max(2 * outlook.loss_budget_s[job], shortest_s)
    for _ in range(12):
        grid = np.linspace(low, high, 21)
        best = int(np.argmin(losses(outlook, leaving, job, node, next_s, grid)))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 20)]
    return float(losses(outlook, leaving, job, node, next_s, grid[[best]])[0]), float(grid[best])


def world(seed: int, jobs: int = 4) -> tuple[np.random.Generator, Network, Nodes, Leaving, Outlook]:
    rng = np.random.default_rng(seed)
    topology = campuses.topology(rng, distinct=True)
    count = topology.nodes
    outlook = Outlook.of(
        jobs,
        count,
        horizon_s=rng.uniform(600, 20_000, jobs),
        emergencies=rng.choice([0.0, 0.1, 1.0, 5.0], (jobs, count)),
        notices=rng.choice([0.0, 0.5, 2.0], (jobs, count)),
        write_bytes_s=rng.uniform(1e6, 1e9, count),
        loss_budget_s=rng.choice([30.0, 900.0, 18_000.0], jobs),
    )
    return rng, Network.direct(topology), campuses.nodes(rng, count), campuses.leaving(rng, count, jobs), outlook


@given(SEEDS)
@settings(max_examples=examples(100))
def test_interval_and_loss_are_the_numeric_optimum(seed: int) -> None:
    rng, network, _, leaving, outlook = world(seed)
    next_s = rng.uniform(1, 500, network.topology.nodes)
    for job in range(4):
        loss_s, interval_s = outlook.loss_s(job, leaving.checkpoint_bytes[job], next_s, 0.2)
        for node in range(network.topology.nodes):
            best_s, at_s = least_loss(outlook, leaving, job, node, next_s[node])
            assert loss_s[node] == pytest.approx(best_s, rel=1e-6)
            assert interval_s[node] == pytest.approx(at_s, rel=1e-3)


def test_a_save_costs_what_it_stalls() -> None:
    # 2 GB over 100 MB/s: 20 s, so that the interval is at least 100 s. The best is sqrt(2 * 3 * 3600 / 1) = 147 s.
    outlook = Outlook.of(
        1, 1, horizon_s=7200, emergencies=2, notices=1, write_bytes_s=1e8, loss_budget_s=900, stall_s=3
    )
    loss_s, interval_s = outlook.loss_s(0, 2e9, np.array([40.0]), 0.2)
    assert interval_s[0] == pytest.approx(21_600**0.5)
    assert loss_s[0] == pytest.approx(2 * (interval_s[0] / 2 + 40) + 40 + 7200 * 3 / interval_s[0])


@given(SEEDS)
@settings(max_examples=examples(200))
def test_joint_choice_is_at_least_as_good_as_algorithm_2_and_then_an_interval(seed: int) -> None:
    rng, network, nodes, leaving, outlook = world(seed, jobs=1)
    rules = Rules(min_local=int(rng.integers(1, 4)))
    survival = np.exp(-outlook.emergencies - outlook.notices)
    apart = choose(network, nodes, leaving, survival, rules)
    together = choose_jointly(network, nodes, leaving, outlook, rules)
    node, joint_node = int(apart.destination[0]), int(together.choices.destination[0])
    assert (node == NOWHERE) == (joint_node == NOWHERE)
    if node == NOWHERE:
        assert np.isnan(together.interval_s[0])
        return
    candidates = np.array([d for d in range(network.topology.nodes) if feasible(network, nodes, leaving, d, rules)])
    mask = np.isin(np.arange(network.topology.nodes), candidates)
    next_s = network.next_s(mask, leaving.checkpoint_bytes[0], leaving.restart_s[0])

    def total_s(d: int) -> float:
        move_s = network.topology.migration_s(leaving.source[0], d, leaving.checkpoint_bytes[0], leaving.restart_s[0])
        return float(move_s) + least_loss(outlook, leaving, 0, d, next_s[d])[0]

    assert together.choices.score_s[0] == pytest.approx(total_s(joint_node), rel=1e-6)
    assert together.choices.score_s[0] <= total_s(node) * (1 + 1e-6) + 1e-6


def feasible(network: Network, nodes: Nodes, leaving: Leaving, node: int, rules: Rules) -> bool:
    move_s = network.topology.migration_s(leaving.source[0], node, leaving.checkpoint_bytes[0], leaving.restart_s[0])
    return bool(
        node != leaving.source[0]
        and nodes.memory_bytes[node] >= leaving.memory_bytes[0]
        and nodes.capability[node] >= leaving.capability[0]
        and nodes.load[node] <= rules.max_load
        and move_s <= leaving.notice_s[0]
    )


NEVER = np.full((4, 8), -np.inf)


@given(SEEDS)
@settings(max_examples=examples(200))
def test_no_job_moves_if_hazards_are_equal(seed: int) -> None:
    """Whatever the bandwidths: a faster node alone is no reason to move."""
    rng, network, nodes, leaving, outlook = world(seed)
    equal = Outlook.of(
        4,
        network.topology.nodes,
        horizon_s=outlook.horizon_s,
        emergencies=float(rng.uniform(0, 10)),
        notices=float(rng.uniform(0, 10)),
        write_bytes_s=outlook.write_bytes_s,
        loss_budget_s=outlook.loss_budget_s,
    )
    found = early_moves(network, nodes, leaving, equal, NEVER, 0.0, policy=Policy())
    assert (found.destination == NOWHERE).all()


def campus(hazards: list[float], memory_bytes: float = 80e9) -> tuple[Network, Nodes]:
    """Equal nodes in one building."""
    count = len(hazards)
    topology = Topology.of(
        [0] * count,
        [0],
        access=Links.of([1e8] * count, 1e8),
        distribution=Links.of([1e9], 1e9),
        core=Links.of([1e9], 1e9),
    )
    return Network.direct(topology), Nodes.of(count, memory_bytes=memory_bytes, capability=8.0, load=0.0)


def moves(
    hazards: list[float],
    sources: list[int],
    moved_s: np.ndarray = NEVER,
    now_s: float = 0.0,
    write_bytes_s: list[float] | None = None,
    stall_s: float | None = None,
    **policy: float,
) -> EarlyMoves:
    """Jobs of 1 GB and 40 GB of memory, with some expected emergencies at each node in the next three hours."""
    network, nodes = campus(hazards)
    writes = np.full(len(hazards), 1e8) if write_bytes_s is None else write_bytes_s
    jobs = Leaving.of(sources, checkpoint_bytes=1e9, memory_bytes=40e9, restart_s=5.0)
    outlook = Outlook.of(
        len(sources), len(hazards), horizon_s=10_800.0, emergencies=hazards, write_bytes_s=writes, loss_budget_s=1800.0,
        stall_s=stall_s,
    )  # fmt: skip
    return early_moves(network, nodes, jobs, outlook, moved_s[: len(sources)], now_s, policy=Policy(**policy))


def test_job_moves_from_an_owner_who_is_about_to_come() -> None:
    found = moves([3.0, 1.0, 0.1], [0])
    assert found.destination.tolist() == [2]
    assert moves([3.0, 2.9, 2.9], [0]).destination.tolist() == [NOWHERE]


def test_faster_saves_are_no_reason_to_move_if_they_hardly_stall() -> None:
    """With equation 1's price of a save, the whole transfer, a link that is faster for the moment seems to be one."""
    links = [2e6, 2e8]
    assert moves([0.011, 0.01], [0], write_bytes_s=links).destination.tolist() == [1]
    assert moves([0.011, 0.01], [0], write_bytes_s=links, stall_s=0.3).destination.tolist() == [NOWHERE]


@given(SEEDS)
@settings(max_examples=examples(200))
def test_move_lowers_the_expected_loss_by_more_than_its_cost(seed: int) -> None:
    _, network, nodes, leaving, outlook = world(seed, jobs=1)
    patient = Leaving(**vars(leaving) | {"notice_s": np.array([np.inf])})
    policy = Policy(margin=0.5)
    found = early_moves(network, nodes, patient, outlook, NEVER[:1], 0.0, policy=policy)
    node, source = int(found.destination[0]), int(leaving.source[0])
    if node == NOWHERE:
        assert found.gain_s[0] == 0
        return
    mask = np.array([feasible(network, nodes, patient, d, Rules()) for d in range(network.topology.nodes)])
    next_s = network.next_s(mask, patient.checkpoint_bytes[0], patient.restart_s[0])
    move_s = network.topology.migration_s(source, node, patient.checkpoint_bytes[0], patient.restart_s[0])
    cost_s = float(2 * move_s + 0.1 * (move_s - patient.restart_s[0]))
    stay_s, go_s = (least_loss(outlook, patient, 0, d, next_s[d])[0] for d in (source, node))
    assert found.gain_s[0] == pytest.approx(stay_s - go_s - cost_s, rel=1e-6, abs=1e-3)
    assert stay_s - go_s - cost_s >= 0.5 * cost_s - 1e-3


def test_simultaneous_moves_share_neither_memory_nor_more_than_the_limit() -> None:
    """The stable node has memory for two jobs. The third moves to the next best node, the fourth stays for now."""
    found = moves([3.0, 3.0, 3.0, 3.0, 0.1, 1.0], [0, 1, 2, 3], most_at_once=3)
    assert found.destination.tolist() == [4, 4, 5, NOWHERE]


def test_job_that_has_just_moved_stays() -> None:
    assert moves([3.0, 0.1], [0], np.full((1, 4), 5000.0), 8000.0).destination[0] == NOWHERE
    assert moves([3.0, 0.1], [0], np.array([[5000.0] + [-np.inf] * 3]), 8600.0).destination[0] == 1


@given(SEEDS)
@settings(max_examples=examples(20))
def test_moves_of_a_job_in_a_day_are_limited(seed: int) -> None:
    """Forecasts that change every ten minutes for two days cause at most the permitted moves in any 24 hours."""
    rng = np.random.default_rng(seed)
    limit, node = int(rng.integers(1, 4)), 0
    times: list[float] = []
    for now_s in np.arange(0, 2 * DAY_S, 600.0):
        recent = np.array([([-np.inf] * limit + times)[-limit:]])
        hazards = rng.choice([0.1, 4.0], 3).tolist()
        target = int(moves(hazards, [node], recent, now_s, most_per_day=limit).destination[0])
        if target != NOWHERE:
            node = target
            times.append(now_s)
    assert all(later - first >= DAY_S for first, later in zip(times, times[limit:], strict=False))
    assert all(second - first >= 3600 for first, second in pairwise(times))
    assert len(times) > limit  # After the first day the job may move again.


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"emergencies: from -1\.0 to 0\.0: must be 0 or more and finite"):
        Outlook.of(1, 2, horizon_s=1, emergencies=[-1, 0], write_bytes_s=1, loss_budget_s=1)
    with pytest.raises(ValueError, match="moved_s: 8 columns: must be 9 or more"):
        moves([1.0, 1.0], [0], most_per_day=9)
    with pytest.raises(ValueError, match="write_share: 0: must be above 0 and at most 1"):
        Policy(write_share=0)
