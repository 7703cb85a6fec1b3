"""The replay: against a plain second-by-second one, and on small examples."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.spot.policies import POLICIES, make_policy
from research.spot.replay import ReplaySettings, replay_spans
from research.spot.traces import UNLIMITED, SpotTrace, SpotTraceError, read_traces, region_of
from research.spot.windows import Windows, means, replay_windows
from services.spot.policies import PolicySettings
from services.spot.values import Observation
from tests.research.spot.plain_replay import plain_replay
from tests.services.spot.strategies import traces, zones_of

_ARTIFACT = {
    "AWS1": {"even-spread": (31.6, 20.5), "round-robin": (90.6, 30.8), "spothedge": (99.4, 50.1)},
    "AWS2": {"even-spread": (40.9, 21.8), "round-robin": (84.2, 29.0), "spothedge": (98.4, 53.4)},
    "AWS3": {"even-spread": (31.5, 21.5), "round-robin": (98.2, 33.0), "spothedge": (99.7, 45.9)},
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(traces(), st.integers(0, 45), st.integers(1, 4), st.integers(0, 2), st.data())
def test_equals_the_plain_replay(
    name: str, trace: SpotTrace, cold_s: int, target: int, extra: int, data: st.DataObject
) -> None:
    """Availability and cost are those of a replay that looks at every second."""
    first = data.draw(st.integers(0, trace.ticks - 1))
    ticks = data.draw(st.integers(1, trace.ticks - first))
    rules = ReplaySettings(target, float(cold_s), 3.0)
    policy = make_policy(name, PolicySettings(trace.zones, extra, retry_s=trace.gap_s))
    found = replay_spans(trace, policy, rules, first, ticks)[0]
    assert (found.availability, found.cost) == pytest.approx(plain_replay(trace, policy, rules, first, ticks))


def test_an_example() -> None:
    """Two zones, one replica: billed from the launch, ready after the cold start, replaced in the other zone."""
    trace = SpotTrace(zones_of(2), 100.0, ((1, 0, 0), (0, 1, 0)))
    policy = make_policy("round-robin", PolicySettings(trace.zones, retry_s=100.0))
    found = replay_spans(trace, policy, ReplaySettings(1, 40.0, 2.0), 0, 3)[0]
    assert found.availability == pytest.approx(120 / 300)
    assert found.cost == pytest.approx(200 / 600)
    # In tick 1 the lost zone itself is not tried, because round robin is at the other one; in tick 2 both refuse.
    assert (found.launches, found.preemptions, found.refusals) == (2, 2, 2)
    hedge = make_policy("spothedge", PolicySettings(trace.zones, 0, retry_s=100.0))
    found = replay_spans(trace, hedge, ReplaySettings(1, 40.0, 2.0), 0, 3)[0]
    # On-demand: seconds 0 to 40, 100 to 140, and 200 to 300, of which the last 60 are ready.
    assert found.availability == pytest.approx((60 + 60 + 60) / 300)
    assert found.cost == pytest.approx((200 + 2 * 180) / 600)
    assert found.on_demand_share == pytest.approx(180 / 380)
    with pytest.raises(ValueError, match="the trace has 3 ticks"):
        replay_spans(trace, hedge, ReplaySettings(), 2, 2)


def test_all_on_demand_costs_one() -> None:
    """The cost of all on-demand replicas is 1, and only the first cold start counts as unavailable."""
    trace = SpotTrace(zones_of(1), 60.0, ((0,) * 10,))
    (result,) = replay_windows(trace, "on-demand", 0, ReplaySettings(cold_start_s=30.0), Windows(10, 1))
    assert (result.cost, result.availability, result.launches) == (pytest.approx(1), pytest.approx(0.95), 3)


def test_windows_depend_only_on_the_seed() -> None:
    """The windows of a seed are the same for every policy and every run, and differ between seeds."""
    counts = tuple(k % 3 for k in range(50))
    trace = SpotTrace(zones_of(3), 60.0, (counts, counts[::-1], counts))
    runs = [
        [one.first_tick for one in replay_windows(trace, name, 1, ReplaySettings(), Windows(7, 20, seed))]
        for name, seed in (("spothedge", 0), ("round-robin", 0), ("spothedge", 1))
    ]
    assert runs[0] == runs[1] != runs[2]
    assert max(runs[0]) <= 43
    again = [list(replay_windows(trace, "spothedge", 1, ReplaySettings(), Windows(7, 20))) for _ in range(2)]
    assert again[0] == again[1]


def test_a_policy_without_end_is_an_error() -> None:
    """A policy that always acts is stopped with an error that names it."""

    class Endless:
        def start(self):
            return None

        def decide(self, state, observation: Observation):
            return state, make_policy("on-demand", PolicySettings(())).decide(state, Observation(0.0, 1, ()))[1]

    trace = SpotTrace(zones_of(1), 60.0, ((0,),))
    with pytest.raises(RuntimeError, match="Endless"):
        replay_spans(trace, Endless(), ReplaySettings(), 0, 1)


def _write(folder: Path, name: str, counts: list[int], gap_s: int = 300) -> None:
    (folder / name).write_text(f'{{"metadata": {{"gap_seconds": {gap_s}}}, "data": {counts}}}')


def test_reading_a_folder(tmp_path: Path) -> None:
    """Zones are sorted and cut to the shortest; counts of at most 1 are unlimited unless the caller says otherwise."""
    _write(tmp_path, "us-west-2b_v100_1.json", [1, 0, 1])
    _write(tmp_path, "us-east-1a_v100_1.json", [0, 1])
    trace = read_traces(tmp_path)
    assert [(zone.name, zone.region) for zone in trace.zones] == [
        ("us-east-1a", "us-east-1"),
        ("us-west-2b", "us-west-2"),
    ]
    assert (trace.capacity, trace.unlimited, trace.cut) == (((0, UNLIMITED), (UNLIMITED, 0)), True, 1)
    assert read_traces(tmp_path, unlimited=False).capacity == ((0, 1), (1, 0))
    _write(tmp_path, "us-west-2b_v100_1.json", [2, 0])
    assert read_traces(tmp_path).capacity == ((0, 1), (2, 0))
    assert (region_of("us-central1-a"), region_of("europe-west4-b"), region_of("9")) == (
        "us-central1",
        "europe-west4",
        "9",
    )


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    """Each error names the file and what is wrong."""

    def refused(word: str) -> None:
        with pytest.raises(SpotTraceError, match=word):
            read_traces(tmp_path / "t")

    refused("is not a folder")
    (tmp_path / "t").mkdir()
    refused("contains no trace")
    _write(tmp_path / "t", "a_v100.json", [1])
    _write(tmp_path / "t", "b_v100.json", [1], gap_s=60)
    refused("b_v100.json: gap_seconds: 60: a_v100.json has 300")
    (tmp_path / "t" / "b_v100.json").write_text('{"data": [')
    refused("b_v100.json: is not a valid trace file")
    _write(tmp_path / "t", "b_v100.json", [-1])
    refused("numbers >= 0")
    _write(tmp_path / "t", "b_v100.json", [1])
    _write(tmp_path / "t", "b_t4.json", [1])
    refused("zone b also has the file b_t4.json")


@pytest.mark.parametrize("trace", _ARTIFACT)
def test_the_published_traces(trace: str) -> None:
    """On the traces of SkyServe's artifact, the means are those of its simulator."""
    root = os.environ.get("MIZZEN_SPOT_TRACES")
    if not root or not (Path(root) / trace).is_dir():
        pytest.skip(f"MIZZEN_SPOT_TRACES does not name a folder with {trace}")
    read = read_traces(Path(root) / trace)
    for name, wanted in _ARTIFACT[trace].items():
        found = means(list(replay_windows(read, name, 1, ReplaySettings(), Windows(288))))
        for field, percent in zip(("availability", "cost"), wanted, strict=True):
            allowed = 0.02 if name == "spothedge" else 2 * found[field].standard_error
            assert abs(found[field].mean - percent / 100) <= allowed, (name, field, found[field], percent)
