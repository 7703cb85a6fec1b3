"""The machines that hold second copies of checkpoints in memory."""

import random
from collections import Counter

import pytest

from domain.memory_peers import memory_peers


@pytest.mark.parametrize("seed", range(200))
def test_each_machine_has_one_peer_of_another_fault_domain_where_possible(seed: int) -> None:
    chance = random.Random(seed)
    racks = [f"r{n}" for n in range(chance.randint(1, 5))]
    domains = {f"m{n}": ("c", chance.choice(racks)) for n in range(chance.randint(2, 20))}
    peers = memory_peers(domains)
    assert peers.keys() == set(peers.values()) == domains.keys()
    same = sum(domains[machine] == domains[peer] for machine, peer in peers.items())
    assert all(machine != peer for machine, peer in peers.items())
    largest = max(Counter(domains.values()).values())
    assert same == max(0, 2 * largest - len(domains))


def test_a_single_machine_has_no_peer() -> None:
    assert memory_peers({"m": "r"}) == memory_peers({}) == {}
