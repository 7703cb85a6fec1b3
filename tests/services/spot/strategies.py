"""Generated zones and traces."""

from hypothesis import strategies as st

from research.spot.traces import SpotTrace
from services.spot.values import Zone


def zones_of(count: int) -> tuple[Zone, ...]:
    return tuple(Zone(f"r{k // 2}-{'abcdefghi'[k]}", f"r{k // 2}") for k in range(count))


@st.composite
def traces(draw: st.DrawFn, most_zones: int = 4) -> SpotTrace:
    count = draw(st.integers(1, most_zones))
    ticks = draw(st.integers(1, 12))
    counts = st.lists(st.integers(0, 3), min_size=ticks, max_size=ticks).map(tuple)
    capacity = tuple(draw(st.lists(counts, min_size=count, max_size=count)))
    return SpotTrace(zones_of(count), float(draw(st.integers(1, 20))), capacity)
