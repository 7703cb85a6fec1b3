"""Chooses for each machine of a gang the one that holds a second copy of its checkpoints in memory."""

from collections import Counter
from collections.abc import Hashable, Mapping


def memory_peers(domains: Mapping[str, Hashable]) -> dict[str, str]:
    """Returns the peer of each machine, given the fault domain of each machine, such as its rack.

    Each machine is the peer of exactly one other machine. If no fault domain has more than half of the machines, each
    peer is in another domain than its machine; else as many as possible are. A single machine has no peer.
    """
    size = Counter(domains.values())
    # Machines of a domain are adjacent, the largest domain first; a shift by its size leaves each domain.
    ordered = sorted(domains, key=lambda machine: (-size[domains[machine]], str(domains[machine]), machine))
    shift = max(size.values(), default=0)
    if shift >= len(ordered):
        shift = 1
    return {m: ordered[(place + shift) % len(ordered)] for place, m in enumerate(ordered)} if len(ordered) > 1 else {}
