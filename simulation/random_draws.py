"""Random draws: each value is a hash of the seed, the attribute and the workload, independent of the event order.

So a workload gets the same values in a filtered trace, under another policy, or on another fleet.
"""

from hashlib import blake2b


def chance(seed: int, what: str, whose: str) -> float:
    """Returns the random number in (0, 1) for the attribute `what` of the object `whose`, uniform over objects."""
    digest = blake2b(f"{seed}\0{what}\0{whose}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 11) + 0.5) / (1 << 53)
