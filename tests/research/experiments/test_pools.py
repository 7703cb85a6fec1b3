"""Fleets with and without pools on one short case: equal workloads, costs, and the report."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from research.experiments.cases import HOUR_S, ExperimentCase
from research.experiments.pools.__main__ import run
from research.experiments.pools.fleets import BOTH, FLEETS, LOAD, MEAN, PEAK, SPOT
from research.experiments.pools.report import BEGIN, write_report
from research.experiments.replay import scene_of
from tests.research.experiments.conftest import SHORT

pytestmark = pytest.mark.long

CASE = ExperimentCase("openb", LOAD, 0)


@pytest.fixture(scope="module")
def found(data_with_spot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a case on all fleets and returns its folder."""
    out = tmp_path_factory.mktemp("pools")
    run(CASE, data_with_spot, out, SHORT)
    return CASE.folder(out)


def fleet(found: Path, name: str) -> Any:
    """Returns the content of a fleet file."""
    return yaml.safe_load((found / f"{name}.yaml").read_text())


def machines(body: Any) -> Counter[tuple[str, int]]:
    """Returns the machines of a fleet file by GPU type and number of GPUs."""
    out: Counter[tuple[str, int]] = Counter()
    for region in body["regions"]:
        for cluster in region["clusters"]:
            for m in cluster["machines"]:
                out[m["gpu_type"], m["gpus"]] += m["count"]
    return out


def test_every_fleet_gets_the_same_work(found: Path) -> None:
    """Every fleet has the same tenants, levels, types and durations, because all drawn values are in the trace."""
    scenes = [scene_of(found, f"{name}.yaml")[1] for name in FLEETS]
    assert len(scenes[0].workloads) > 50
    assert all(scene.workloads == scenes[0].workloads for scene in scenes)
    assert all(scene.tenants == scenes[0].tenants for scene in scenes)
    with (found / "trace.csv").open() as file:
        assert all(row["gpu_type"] for row in csv.DictReader(file))


def test_pools_make_up_for_the_peak(found: Path) -> None:
    """Static machines and pools together have as many machines per type as the peak fleet, up to rounding by region."""
    peak, half = machines(fleet(found, PEAK)), machines(fleet(found, SPOT))
    assert sum(half.values()) < sum(machines(fleet(found, MEAN)).values()) <= sum(peak.values())
    may: Counter[str] = Counter()
    for pool in fleet(found, SPOT)["pools"]:
        may[pool["machine_types"][0]] += pool["max_size"]
    for (gpu_type, gpus), count in peak.items():
        most = half[gpu_type, gpus] + may[f"{gpu_type}-{gpus}"]
        assert count - 5 <= most <= count + 5
    assert {zone.get("kind", "spot") for zone in fleet(found, SPOT)["providers"]["cloud"]["zones"].values()} == {"spot"}


def test_costs_are_machines_times_hours_times_prices(found: Path) -> None:
    """Static machines are paid for the whole measured span, busy or not; pools cost their launched time."""
    usd_per_gpu_h = {"g2": 2.0, "v100": 2.0, "p100": 1.0}
    for name in FLEETS:
        usd = json.loads((found / f"{name}.json").read_text())["machines"]["usd_by"]
        hours = SHORT.measured_s / HOUR_S
        static = sum(count * gpus * usd_per_gpu_h[t] for (t, gpus), count in machines(fleet(found, name)).items())
        assert usd["reserved"] == pytest.approx(static * hours)
        assert (usd["spot"] > 0) == (name in (SPOT, BOTH))
        assert usd["on_demand"] == 0 or name == BOTH


def test_the_report_has_them_side_by_side(found: Path, tmp_path: Path) -> None:
    """The report has a row for each fleet, keeps the text around its tables, and has a chart."""
    report = tmp_path / "docs" / "report.md"
    report.parent.mkdir()
    report.write_text(f"# Title\n\nBefore.\n\n{BEGIN}\nold\n<!-- end of the tables -->\n\nAfter.\n")
    write_report(found.parent, report)
    text = report.read_text()
    assert text.startswith("# Title\n\nBefore.") and text.endswith("After.\n") and "old" not in text
    assert all(text.count(f"| {says} |") == 4 for says in FLEETS.values())
    assert (report.parent / "experiments" / "pools.svg").exists()


def test_what_has_been_run_is_not_run_again(found: Path, data_with_spot: Path) -> None:
    """A run that was interrupted continues with the fleets that have no outcome yet."""
    (found / f"{SPOT}.json").unlink()
    before = {name: (found / f"{name}.json").stat().st_mtime_ns for name in (PEAK, MEAN, BOTH)}
    run(CASE, data_with_spot, found.parent, SHORT)
    assert {name: (found / f"{name}.json").stat().st_mtime_ns for name in before} == before
    assert (found / f"{SPOT}.json").exists()
