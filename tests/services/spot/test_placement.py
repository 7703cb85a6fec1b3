"""Dynamic Placement: the invariants of Algorithm 1, and its choices in examples."""

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from services.spot.placement import DynamicPlacement
from services.spot.values import PolicyState, Zone
from tests.services.spot.strategies import zones_of

_STATE = TypeAdapter(PolicyState)

_STEPS = st.lists(st.tuples(st.sampled_from(["preempted", "launched", "select"]), st.integers(0, 5)), max_size=60)


@given(st.integers(2, 6), st.booleans(), _STEPS)
def test_invariants(count: int, spread: bool, steps: list[tuple[str, int]]) -> None:
    """At least two zones are active; a launch makes a zone active; a reset only occurs below two; draws are active."""
    placement = DynamicPlacement(zones_of(count), spread)
    names = {zone.name for zone in placement.zones}
    state = placement.start()
    placed: list[str] = []
    for what, k in steps:
        zone = placement.zones[k % count].name
        before = set(state.available)
        if what == "preempted":
            state = placement.preempted(state, zone)
            expected = before - {zone}
            assert set(state.available) == (expected if len(expected) >= 2 else names)
        elif what == "launched":
            state = placement.launched(state, zone)
            assert set(state.available) == before | {zone}
        else:
            drawn = placement.select(state, placed)
            assert drawn in before
            if unused := before - set(placed):
                assert drawn in unused
            placed.append(drawn)
        assert len(state.available) >= 2
        assert {*state.available, *state.preempting} == names
        assert not set(state.available) & set(state.preempting)


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=10), st.integers(0, 63))
def test_spread_prefers_fewest_replicas(count: int, placed: list[int], without: int) -> None:
    """With the option, the drawn zone has the fewest replicas of the active zones that are not excluded."""
    placement = DynamicPlacement(zones_of(count))
    names = [zone.name for zone in placement.zones]
    held = [names[k % count] for k in placed]
    excluded = {name for k, name in enumerate(names) if without >> k & 1}
    drawn = placement.select(placement.start(), held, excluded)
    usable = [name for name in names if name not in excluded]
    assert drawn == min(usable, key=held.count, default=None)


def test_prices_and_ties() -> None:
    """Without replicas the cheapest zone is drawn, and among equal prices the first; the literal algorithm stacks."""
    zones = (Zone("a", "r", 2.0), Zone("b", "r", 1.0), Zone("c", "r", 1.0))
    literal, spread = DynamicPlacement(zones, spread=False), DynamicPlacement(zones)
    for placement in (literal, spread):
        assert placement.select(placement.start(), []) == "b"
        assert placement.select(placement.start(), ["b"]) == "c"
        assert placement.select(placement.start(), ["b", "c"]) == "a"
        assert placement.select(placement.start(), [], {"a", "b", "c"}) is None
    assert literal.select(literal.start(), ["a", "b", "b", "c"]) == "b"
    assert spread.select(spread.start(), ["a", "b", "b", "c"]) == "c"


_NAMES = st.lists(st.text(max_size=3), max_size=4, unique=True)
_WAITS = st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=4)


@given(_NAMES, _NAMES, _WAITS)
def test_state_survives_json(available: list[str], preempting: list[str], waits: dict[str, float]) -> None:
    """A state that was stored as JSON is equal to the original."""
    state = PolicyState(tuple(available), tuple(preempting), tuple(sorted(waits.items())))
    assert _STATE.validate_json(_STATE.dump_json(state)) == state
