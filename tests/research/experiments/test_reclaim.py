"""The measurements of docs/reclaim.md: what they state, and the reader of real machines on a small trace."""

import lzma
from pathlib import Path

import numpy as np
import pytest

from reclaim.hazard import HazardSettings
from research.experiments.reclaim.campus import DAY_S, bandwidth, campus
from research.experiments.reclaim.p1 import adaptivity_gaps, drift_arithmetic, table, window_convergence
from research.experiments.reclaim.traces import read_up, score


def test_the_arithmetic_of_the_published_shift() -> None:
    """The rows that docs/reclaim.md quotes."""
    rows = dict(drift_arithmetic())  # type: ignore[arg-type]
    assert rows["expected in 18 minutes at 1.7 times the rate"] == "0.126"
    assert rows["probability that there is none"] == "88% (peaks: 66%)"
    gaps = dict(adaptivity_gaps())  # type: ignore[arg-type]
    assert gaps["lognormal, exact"] == "3.5%" and "0.0521" in gaps.values()


def test_no_window_converges_within_18_minutes() -> None:
    """With any window, the estimate is within 10% after 18 minutes in less than a tenth of the runs."""
    rows = list(window_convergence(runs=300))
    assert all(float(row[1].rstrip("%")) < 10 for row in rows) and rows[0][2] == "never"
    assert table("a | b | c | d", iter(rows)).count("\n") == len(rows) + 1


def test_the_campus_has_the_counts_of_the_paper() -> None:
    """About 356 emergencies in 60 days, and in the peaks six times as many for each hour; bandwidth as asked."""
    draw = np.random.default_rng(1)
    site = campus(draw)
    counts = [site.departures(draw, 0.0, 60 * DAY_S)[1] for _ in range(20)]
    hour = np.concatenate(counts) % DAY_S / 3600
    high = ((hour >= 11.5) & (hour < 13)) | ((hour >= 17.5) & (hour < 20))
    assert np.mean([len(one) for one in counts]) == pytest.approx(355.7, rel=0.03)
    assert high.sum() / 4 / ((~high).sum() / 20) == pytest.approx(6, rel=0.1)
    assert bandwidth(draw, 300, 600, 1e8).mean() == pytest.approx(1e8, rel=0.05)


def write(path: Path, rows: list[tuple[str, int, float, float]]) -> Path:
    """Writes a table of the Failure Trace Archive."""
    with lzma.open(path, "wt") as file:
        file.write("# event_id component_id node_id platform_id node_name event_type start stop reason\n")
        for i, (name, kind, start_s, end_s) in enumerate(rows):
            file.write(f"{i}\t0\t0\t5\t{name}\t{kind}\t{start_s:.0f}\t{end_s:.0f}\tNULL\n")
    return path


def test_a_site_with_a_daily_habit_is_predicted(tmp_path: Path) -> None:
    """Ten machines leave at noon and return in the evening: the estimate is far better than a constant hazard."""
    draw = np.random.default_rng(2)
    rows = []
    for machine in range(10):
        back_s = 0.0
        for day in range(42):
            noon_s = day * DAY_S + 43_200 + draw.uniform(0, 1800)
            rows += [(f"g/s/c/{machine}", 1, back_s, noon_s), (f"g/s/c/{machine}", 0, noon_s, noon_s + 20_000)]
            back_s = noon_s + 20_000
    up = read_up(write(tmp_path / "t.xz", [*rows, ("g/other/c/1", 1, 0, 100), ("g/s/c/1", 1, 50, 50)]))
    found = score(up.of_site("s", 0.0, 42 * DAY_S), 0.0, 42, 14, HazardSettings())
    assert len(up.names) == 11 and found is not None and found.departures == 280
    assert found.gain > 1 and found.ratio == pytest.approx(1, abs=0.3)
    assert score(up.of_site("other", 0.0, DAY_S), 2000.0, 1, 0, HazardSettings()) is None


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.xz"
    with lzma.open(path, "wt") as file:
        file.write("# head\n1\t2\t3\n")
    with pytest.raises(ValueError, match="line 2: must have a type, a start and an end in columns 6 to 8"):
        read_up(path)
