"""P2: bandwidths and choices against a plain network and a transcription of algorithm 2."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.buildings import Rules
from research.reclaim.algorithm_2 import Constraint, Nodes, choose, removed_by
from research.reclaim.destinations import Leaving, Network
from research.reclaim.onward import Onward
from research.reclaim.paths import links_bytes_s, paths
from research.reclaim.topology import NOWHERE, Links, Store, Topology
from tests.depth import examples
from tests.reclaim import campuses
from tests.reclaim.plain_destinations import PlainNetwork, scores

SEEDS = st.integers(0, 2**32 - 1)


def network(topology: Topology, by_store: bool) -> Network:
    return Network.by_store(topology) if by_store else Network.direct(topology)


@given(SEEDS)
@settings(max_examples=examples(100))
def test_bandwidth_is_the_bottleneck_of_the_path(seed: int) -> None:
    """The formula, the least link of `paths` and a search in a graph agree for every pair of endpoints."""
    topology = campuses.topology(np.random.default_rng(seed))
    plain = PlainNetwork(topology, by_store=False)
    ends = np.arange(len(topology.building))
    found = topology.bandwidth_bytes_s(ends[:, None], ends)
    with_padding = np.append(links_bytes_s(topology), np.inf)
    for source in ends:
        by_links = with_padding[paths(topology, source, ends)].min(axis=1)
        assert (by_links == found[source]).all()
        for target in ends:
            if target != source:
                assert found[source, target] == plain.bandwidth(source, target)


@given(SEEDS, st.booleans(), st.booleans())
@settings(max_examples=examples(200))
def test_mean_onward_time_equals_the_mean_over_pairs(seed: int, by_store: bool, distinct: bool) -> None:
    rng = np.random.default_rng(seed)
    topology = campuses.topology(rng, distinct=distinct)
    candidates = rng.random(topology.nodes) < rng.random()
    stores = topology.store_of(np.arange(topology.nodes)) if by_store else None
    found = Onward.of(topology, stores).mean_s_byte(candidates)
    plain = PlainNetwork(topology, by_store)
    for node in range(topology.nodes):
        times = [plain.migration_s(node, d, 1.0, 0.0) for d in np.flatnonzero(candidates) if d != node]
        assert found[node] == pytest.approx(np.mean(times) if times else 0.0, rel=1e-9)


@given(SEEDS, st.booleans())
@settings(max_examples=examples(200))
def test_choice_is_that_of_algorithm_2(seed: int, by_store: bool) -> None:
    """Every job gets a destination of the least score, or none if no node satisfies the constraints."""
    rng = np.random.default_rng(seed)
    topology = campuses.topology(rng)
    count = topology.nodes
    nodes, leaving = campuses.nodes(rng, count), campuses.leaving(rng, count, 4)
    rules = Rules(float(rng.choice([0.0, 0.5, 1.0, 2.0])), 0.8, int(rng.integers(1, 5)))
    survival = rng.choice([0.0, 0.5, 0.9, 1.0], (4, count))
    found = choose(network(topology, by_store), nodes, leaving, survival, rules)
    plain = PlainNetwork(topology, by_store)
    left = Nodes(nodes.memory_bytes.copy(), nodes.capability, nodes.load.copy())
    for job in sorted(range(4), key=lambda j: (leaving.notice_s[j], j)):
        expected = scores(plain, topology, left, leaving, job, survival, rules)
        chosen = int(found.destination[job])
        assert (chosen == NOWHERE) == (not expected)
        assert found.counts[job].sum() == count
        if chosen == NOWHERE:
            assert found.counts[job, Constraint.NONE] == 0
            continue
        assert found.score_s[job] == pytest.approx(expected[chosen], rel=1e-9)
        assert expected[chosen] <= min(expected.values()) * (1 + 1e-9) + 1e-6
        left.memory_bytes[chosen] -= leaving.memory_bytes[job]
        left.load[chosen] += leaving.load[job]


def building(nodes: int, down_bytes_s: object = 1e8, stores: tuple[Store, ...] = ()) -> Topology:
    return Topology.of(
        [0] * nodes,
        [0],
        access=Links.of([1e8] * nodes, down_bytes_s),
        distribution=Links.of([1e8], 1e8),
        core=Links.of([1e9], 1e9),
        stores=stores,
    )


def one_building(nodes: int, **changes: object) -> tuple[Topology, Nodes, Leaving]:
    """A job of 1 GB leaves node 0 of a building with equal nodes."""
    topology = building(nodes)
    have = Nodes(np.full(nodes, 8e9), np.full(nodes, 8.0), np.zeros(nodes))
    fields: dict[str, object] = {"checkpoint_bytes": 1e9, "memory_bytes": 4e9, "capability": 7.0}
    fields |= {"notice_s": 60.0, "restart_s": 5.0, "commit_s": 0.0} | changes
    return topology, have, Leaving.of([0] * np.size(fields["notice_s"]), **fields)


def test_equal_nodes_are_chosen_by_number() -> None:
    topology, nodes, leaving = one_building(5)
    assert choose(Network.direct(topology), nodes, leaving, 1.0).destination[0] == 1
    nodes.load[1] = 0.9
    assert choose(Network.direct(topology), nodes, leaving, 1.0).destination[0] == 2


def test_unstable_local_node_loses_to_a_stable_one() -> None:
    topology, nodes, leaving = one_building(3)
    found = choose(Network.direct(topology), nodes, leaving, [1.0, 0.5, 0.9])
    assert found.destination[0] == 2
    assert found.score_s[0] == pytest.approx(15 + 0.1 * 15)


def test_local_candidates_are_preferred_only_if_there_are_enough() -> None:
    """Lemma 3: two candidates in the building exclude a faster node elsewhere if k_min is 2, not if it is 3."""
    topology = Topology.of(
        [0, 0, 0, 1],
        [0, 0],
        access=Links.of([1e9] * 4, [1e9, 1e7, 1e7, 1e9]),
        distribution=Links.of([1e9, 1e9], 1e9),
        core=Links.of([1e9], 1e9),
    )
    _, nodes, leaving = one_building(4, notice_s=np.inf)
    for min_local, expected in ((2, 1), (3, 3)):
        rules = Rules(min_local=min_local)
        assert choose(Network.direct(topology), nodes, leaving, 1.0, rules).destination[0] == expected


def test_simultaneous_jobs_do_not_take_the_same_memory() -> None:
    topology, nodes, leaving = one_building(4, memory_bytes=5e9, notice_s=[60, 30, 40])
    assert choose(Network.direct(topology), nodes, leaving, 1.0).destination.tolist() == [3, 1, 2]


def test_reason_counts_the_nodes_that_each_constraint_removes() -> None:
    topology, nodes, leaving = one_building(7, notice_s=10.0)
    nodes.memory_bytes[1:3] = 1e9
    nodes.capability[3] = 6.1
    nodes.load[4] = 0.95
    found = choose(Network.direct(topology), nodes, leaving, 1.0)
    assert found.destination[0] == NOWHERE
    assert np.isnan(found.score_s[0])
    assert found.reason(0) == (
        "0 of 7 nodes can take the job (1: the source itself; 2: less than 4,000,000,000 bytes of free memory; "
        "1: a capability below 7; 1: a load above 0.8; 2: no migration within the notice of 10 s)"
    )


def test_with_a_store_only_the_upload_must_precede_the_departure() -> None:
    """10 s of upload and 1 s of commit fit in 11 s; the download and the restart come afterwards."""
    _, nodes, leaving = one_building(3, notice_s=11.0, commit_s=1.0)
    stored = building(3, stores=(Store(0),))
    found = choose(Network.by_store(stored), nodes, leaving, 1.0)
    assert (found.destination[0], found.migration_s[0]) == (1, 25.0)
    removed, _ = removed_by(Network.direct(stored), nodes, leaving, 0, Rules())
    assert removed.tolist() == [Constraint.SOURCE, Constraint.DEADLINE, Constraint.DEADLINE]
    _, nodes, leaving = one_building(3, notice_s=11.0, commit_s=1.5)
    assert choose(Network.by_store(stored), nodes, leaving, 1.0).destination[0] == NOWHERE


def test_job_of_a_machine_that_is_gone_only_downloads() -> None:
    _, nodes, leaving = one_building(3, upload_bytes=0.0, notice_s=np.inf)
    found = choose(Network.by_store(building(3, stores=(Store(0),))), nodes, leaving, 1.0)
    assert found.migration_s[0] == 15.0


def test_dead_link_meets_no_deadline() -> None:
    _, nodes, leaving = one_building(2)
    dead = building(2, down_bytes_s=[1e8, 0.0])
    found = choose(Network.direct(dead), nodes, leaving, 1.0)
    assert found.counts[0, Constraint.DEADLINE] == 1


def test_wrong_values_are_refused() -> None:
    topology, nodes, leaving = one_building(2)
    with pytest.raises(ValueError, match=r"survival: from 1\.5 to 1\.5: must be from 0 to 1"):
        choose(Network.direct(topology), nodes, leaving, 1.5)
    with pytest.raises(ValueError, match="node 0: no store"):
        Network.by_store(topology)
    with pytest.raises(ValueError, match=r"max_load: 1\.5: must be from 0 to 1"):
        Rules(max_load=1.5)
    with pytest.raises(ValueError, match=r"up_bytes_s\[1\]: nan: must be a number"):
        Links.of([1.0, np.nan], 1.0)
    with pytest.raises(ValueError, match=r"node_building\[1\]: 3: must be from 0 to 0"):
        Topology.of([0, 3], [0], access=Links.of([1, 1], 1), distribution=Links.of([1], 1), core=Links.of([1], 1))
