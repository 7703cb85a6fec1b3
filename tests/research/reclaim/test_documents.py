"""Scenario files: what is drawn has the promised figures, and any set of times of lending is accepted or refused."""

import os
from pathlib import Path

import numpy as np
import pytest

from research.reclaim.engine import simulate
from research.reclaim.scenario import DAY_S
from research.reclaim.scenario_files import ScenarioDocument, build, read
from research.reclaim.systems import SYSTEMS
from research.reclaim.traces import ScenarioError, read_csv, read_failure_trace

SCENARIOS = Path(__file__).parents[3] / "research" / "experiments" / "reclaim" / "scenarios"
CAMPUS = Path(os.environ.get("MIZZEN_DATA", Path(__file__).parents[4] / "shared" / "data")) / "campus-availability"


def test_the_campus_has_the_figures_of_section_4() -> None:
    given = build(read(SCENARIOS / "campus.yaml"), SCENARIOS)
    departs = given.lending.departs
    assert departs.sum() == 847
    notice_s = given.lending.notice_s[departs]
    assert (notice_s == 0).sum() == round(0.42 * 847)
    assert notice_s[notice_s > 0].min() > 0
    assert given.correlation() == pytest.approx(-0.43, abs=0.005)
    assert np.bincount(given.machines.gpus).tolist() == [0, 35, 10, 0, 8]
    assert len(given.work) == 312
    assert float(given.work.gpus @ given.work.work_s) / 3600 == pytest.approx(4890)
    sizes = given.work.checkpoint_bytes
    assert np.median(sizes) == pytest.approx(3.2e9, rel=0.02)
    # The extremes are those of the figure, and no job beside them is at a limit.
    assert sizes.min() == pytest.approx(120e6) and sizes.max() == pytest.approx(48e9)
    assert (sizes == sizes.min()).sum() == (sizes == sizes.max()).sum() == 1
    local, switches, core = np.split(given.links_bytes_s, (53, 57))
    assert local.mean() == pytest.approx(820e6 / 8, rel=0.02)
    assert switches.mean() == pytest.approx(6e9 / 8, rel=0.02)
    assert core.mean() == pytest.approx(240e6 / 8, rel=0.02)
    # Departures in the peaks are about as many times as frequent as the factor says, for the hours that are lent.
    hour = (given.start_s + given.lending.to_s[departs]) % DAY_S / 3600
    peak = ((hour >= 11.5) & (hour < 13)) | ((hour >= 17.5) & (hour < 20))
    assert 4.5 < (peak.sum() / 4) / ((~peak).sum() / 20) < 7.5


def test_seeds_differ_and_repeat() -> None:
    document = ScenarioDocument(version=1, name="x", days=5, calibration_days=1)
    first, again, other = (build(document, Path(), seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.lending.to_s, again.lending.to_s)
    assert np.array_equal(first.links_bytes_s, again.links_bytes_s)
    assert not np.array_equal(first.lending.to_s[:5], other.lending.to_s[:5])


def test_intervals_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "up.csv").write_text(
        "# comings and goings\n"
        "node,up,down,notice_s,building,gpus\n"
        "a,0,7200,0,east,2\n"
        "a,7000,9000,60,east,2\n"  # Overlaps the first, so it ends with the second's notice.
        "b,-500,90000,,west,\n"  # Begins before the scenario.
        "c,2026-03-02T01:00:00+00:00,,,west,\n"  # Still there at the end.
        "d,100,100,,west,\n"  # No time at all.
        "e,900000000,900000100,,west,\n"  # After the end.
        "\n"
    )
    document = ScenarioDocument(
        version=1, name="x", days=2, calibration_days=0, availability={"csv": "up.csv"},  # type: ignore[arg-type]
        jobs={"count": 10, "gpu_hours": 20},  # type: ignore[arg-type]
    )  # fmt: skip
    given = build(document, tmp_path)
    assert given.machines.names == ("a", "b", "c")
    assert given.buildings == ("east", "west")
    assert given.machines.gpus[0] == 2
    lending = given.lending
    rows = {
        (given.machines.names[n], a, b, d)
        for n, a, b, d in zip(lending.node, lending.from_s, lending.to_s, lending.departs, strict=True)
    }
    assert rows == {("a", 0, 9000, True), ("b", 0, 90000, True), ("c", 3600, 172800, False)}
    assert lending.notice_s[lending.node == 0] == 60
    for name in ("slurm-pr", "reclaimnet", "true-rates", "joint"):
        whole = simulate(given, SYSTEMS[name]).whole
        assert whole.held == pytest.approx(whole.useful + whole.lost + whole.overhead, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node,up\na,0\n", "down is missing"),
        ("", "node, up, down is missing"),
        ("node,up,down\na,5,1\n", "line 2: down: 1: must not be before up, 5"),
        ("node,up,down\na,soon,1\n", "line 2: up: 'soon': must be seconds"),
        ("node,up,down\n,0,1\n", "line 2: node: is empty"),
        ("node,up,down\na,0\n", "line 2: 2 values: must be 3"),
        ("node,up,down,notice_s\na,0,1,-3\n", "line 2: notice_s: '-3': must be a number, 0 or more"),
        ("node,up,down\na,nan,1\n", "line 2: up: 'nan': must be a number"),
        ("node,up,down\na,9e9,9e10\n", "no interval is between"),
    ],
)
def test_bad_intervals_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "up.csv").write_text(text)
    with pytest.raises(ScenarioError, match=said):
        read_csv(tmp_path / "up.csv", 0.0, 1000.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 2\nname: x\n", "version"),
        ("version: 1\nname: x\ndays: 5\n", "calibration_days: 14: must be below 5"),
        ("version: 1\nname: x\navailability: {}\n", "exactly one of"),
        ("version: 1\nname: x\nmachine: 3\n", "machine"),
        ("version: 1\nname: x\ndepartures: {notice_median_s: 5}\n", "must be above 10"),
        ("a: [", "scenario.yaml"),
    ],
)
def test_bad_documents_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "scenario.yaml").write_text(text)
    with pytest.raises(ScenarioError, match=said):
        read(tmp_path / "scenario.yaml")


def test_a_failure_trace(tmp_path: Path) -> None:
    def row(node: str, kind: int, start: int, stop: int) -> str:
        return f"0 0 0 5 {node} {kind} {start} {stop} NULL\n"

    (tmp_path / "event_trace.tab").write_text(
        "# event_id component_id node_id platform_id node_name event_type event_start_time event_stop_time reason\n"
        + row("G/s1/c/n1", 0, 1000, 2000) + row("G/s1/c/n1", 1, 2000, 5000)
        # A gap of ten seconds is a probe that failed.
        + row("G/s1/c/n1", 1, 5010, 9000) + row("G/s2/c/n1", 1, 1000, 90_000)
    )  # fmt: skip
    found, start_s = read_failure_trace(tmp_path, (), 2, 2, 0.0, DAY_S, np.random.default_rng(1))
    assert start_s == 1000
    assert [(one.node, one.building, one.from_s, one.to_s) for one in found] == [
        ("G/s2/c/n1", "s2", 0, 89_000), ("G/s1/c/n1", "s1", 1000, 8000),
    ]  # fmt: skip
    with pytest.raises(ScenarioError, match="known are s1, s2"):
        read_failure_trace(tmp_path, ("s9",), 2, 2, 0.0, DAY_S, np.random.default_rng(1))


@pytest.mark.skipif(not CAMPUS.exists(), reason="the folder with Grid'5000's failure trace is absent")
def test_grid5000() -> None:
    given = build(read(SCENARIOS / "grid5000.yaml"), SCENARIOS, CAMPUS)
    assert len(given.machines) > 40 and len(given.buildings) == 4
    assert given.lending.departs.sum() > 500
    for node in range(len(given.machines)):
        mine = given.lending.node == node
        order = np.argsort(given.lending.from_s[mine])
        assert (given.lending.from_s[mine][order][1:] > given.lending.to_s[mine][order][:-1]).all()
