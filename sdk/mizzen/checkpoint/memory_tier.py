"""Opens the memory tier of a `Checkpointer` with `Tiers`, and its cadence."""

from collections.abc import Sequence

from mizzen.cadence import Cadence
from mizzen.checkpoint.tier_cadence import TierCadence, Tiers
from mizzen.memory.memory_store import host_of_environ, open_memory
from mizzen.objects.store import ObjectStore


def with_memory(stores: Sequence[ObjectStore], tiers: Tiers, cadence: Cadence) -> tuple[list[ObjectStore], TierCadence]:
    """Return the stores with that of the memory tier before them, and their cadence; set the interval of saves.

    Errors of the memory tier are warnings, here and later.
    """
    found = list(stores)
    if tiers.memory_bytes != 0:
        address = (tiers.address or host_of_environ()) if tiers.peers else None
        memory = open_memory(stores[-1], limit_bytes=tiers.memory_bytes, idle_s=tiers.idle_s, address=address)
        found.insert(0, memory)
    machine = cadence.explain().mtbf
    chosen = TierCadence(tiers, machine, len(found))
    if len(found) > 1:
        cadence.update(mtbf=tiers.process_mtbf(machine))
    return found, chosen
