"""Immunity follows chains of evictions back to their first evictor."""

from gms.auction.immunity import immune_to


def test_all_who_led_to_an_eviction_are_immune() -> None:
    """A workload's evictor, the evictors of that one, and so on are immune; its own victims and itself are not."""
    evictors = {"c": {"b"}, "b": {"a", "x"}, "d": {"c"}, "other": {"a"}}
    assert immune_to("c", evictors) == {"a", "b", "x"}
    assert immune_to("a", evictors) == frozenset()
    assert immune_to("a", {"a": {"b"}, "b": {"a"}}) == {"b"}
