"""`mizzen reclaim simulate`: tables, JSON and report, beside the owner's command of the same name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from research.reclaim.commands import reclaim_simulate

SCENARIO = """\
version: 1
name: short
days: 5
calibration_days: 1
jobs: {count: 40, gpu_hours: 600}
availability: {drawn: {departures: 250}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_results(scenario: Path, tmp_path: Path) -> None:
    body, page = tmp_path / "out.json", tmp_path / "out.html"
    given = ["--scenario", scenario, "--system", "slurm-pr", "--system", "no-migration", "--seeds", "2"]
    found = CliRunner().invoke(reclaim_simulate, [*map(str, given), "--json", str(body), "--report", str(page)])
    assert found.exit_code == 0, found.output
    rows = json.loads(body.read_text())["rows"]
    assert [(row["system"], row["seed"]) for row in rows] == [
        ("slurm-pr", 1), ("no-migration", 1), ("slurm-pr", 2), ("no-migration", 2),
    ]  # fmt: skip
    mean = sum(row["loss_gpu_h"] for row in rows if row["system"] == "slurm-pr") / 2
    assert f"{mean:.2f} (8.20)" in found.output
    text = page.read_text()
    assert f"{mean:.2f} (8.20)" in text and "no-migration" in text
    assert "<script" not in text and "http://" not in text.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")


def test_standard_output_is_one_document(scenario: Path) -> None:
    found = CliRunner().invoke(
        reclaim_simulate, ["--scenario", str(scenario), "--system", "no-migration", "--json", "-"]
    )
    assert found.exit_code == 0
    assert json.loads(found.stdout)["scenario"] == "short"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--system", "slurm"), "--system: slurm: no such system: give one of table-3"),
        (("--system", "slurm-pr", "--report", "/proc/nowhere/x.html"), "folder /proc/nowhere does not exist"),
    ],
)
def test_bad_options(scenario: Path, options: tuple[str, ...], said: str) -> None:
    found = CliRunner().invoke(reclaim_simulate, ["--scenario", str(scenario), *options])
    assert found.exit_code == 2
    assert said in found.stderr


def test_a_bad_scenario_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("version: 1\nname: x\navailability: {csv: none.csv}\n")
    found = CliRunner().invoke(reclaim_simulate, ["--scenario", str(path), "--system", "true-rates"])
    assert found.exit_code == 2
    assert "--scenario:" in found.stderr and "none.csv" in found.stderr


@pytest.mark.parametrize(("arguments", "said"), [(["simulate", "--help"], "--scenario"), (["--help"], "--notice")])
def test_both_commands_of_the_name(arguments: list[str], said: str, tmp_path: Path) -> None:
    """The plugin's entry point is given by a folder on the path, as if this version were installed."""
    info = tmp_path / "x-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[mizzen.commands]\nreclaim-simulate = research.reclaim.commands:reclaim_simulate\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = {['reclaim', *arguments]!r}; "
        "from mizzen.cli.main import main; main()"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert said in found.stdout
