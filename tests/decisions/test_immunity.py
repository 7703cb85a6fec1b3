"""Immunity follows chains of evictions back to their beginnings."""

from auction.immunity import immune_to


def test_all_who_led_to_an_eviction_are_immune() -> None:
    """Who evicted it, who evicted them, and so on; not its own victims, those of others, or itself."""
    evictors = {"c": {"b"}, "b": {"a", "x"}, "d": {"c"}, "other": {"a"}}
    assert immune_to("c", evictors) == {"a", "b", "x"}
    assert immune_to("a", evictors) == frozenset()
    assert immune_to("a", {"a": {"b"}, "b": {"a"}}) == {"b"}
