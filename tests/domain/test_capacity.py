"""The values that take the place of capacity kinds in bids."""

from domain.capacity import dedicated, kind_in_pool, own_of, pooled, with_pools


def test_kinds_in_pools() -> None:
    """A pool's machines come before others of the same kind, and each value says which kind it replaces."""
    kinds = (dedicated("svc"), own_of("t"), "spot")
    accepted = with_pools(kinds, ["r/p", "r/q"])
    assert accepted[-3:] == (pooled("r/p", "spot"), pooled("r/q", "spot"), "spot")
    assert tuple(dict.fromkeys(map(kind_in_pool, accepted))) == kinds
    assert with_pools(kinds, []) == kinds
