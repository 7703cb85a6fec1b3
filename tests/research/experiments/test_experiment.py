"""The experiment from trace to report: windows, loads, levels, policies, the bound and tables, on generated data."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ortools.linear_solver import pywraplp

from research.experiments.bound import BUCKET_S, Fluid, bound, most_gpu_h
from research.experiments.cases import (
    BY_TENANT,
    DATA,
    FEW_REGIONS,
    HOUR_S,
    MIXED,
    POLICIES,
    ExperimentCase,
    case_of,
    cases,
)
from research.experiments.replay import replay
from research.experiments.report import BEGIN, END, write_report
from research.experiments.scenes import build, windows
from research.experiments.summary import PolicyResult, Wait, misses
from research.traces.trace_readers import read_trace
from tests.research.experiments.conftest import BURST_H, SHORT


@pytest.fixture(scope="module")
def outcomes(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs some policies on two cases of openb."""
    return _run(data, tmp_path_factory.mktemp("outcomes"), {MIXED: ("global", "fifo"), FEW_REGIONS: DATA[:1]})


@pytest.fixture(scope="module")
def all_outcomes(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs every policy on one case of openb."""
    return _run(data, tmp_path_factory.mktemp("all-outcomes"), {BY_TENANT: POLICIES})


def _run(data: Path, out: Path, chosen: dict[str, Sequence[str]]) -> Path:
    """Runs the chosen policies of each variant and returns the folder of the outcomes."""
    for variant, policies in chosen.items():
        case = ExperimentCase("openb", 1.3, 0, variant)
        build(case, data, out, SHORT)
        for policy in policies:
            (case.folder(out) / f"{policy}.json").write_text(json.dumps(replay(case.folder(out), policy)))
        (case.folder(out) / "bound.json").write_text(json.dumps(bound(case.folder(out))))
    return out


def test_windows_are_where_most_gang_gpus_arrive(data: Path) -> None:
    """The first window is at the burst of gangs; the second is half a day away or more; both come after the warm-up."""
    rows = read_trace(f"philly:{data / 'philly.csv'}").rows
    first_s = min(row.submit_s for row in rows)
    one, two = windows(rows, 8, 2, SHORT)
    assert BURST_H - 1 <= (one.from_s - first_s) / HOUR_S <= BURST_H
    assert abs(two.from_s - one.from_s) > 12 * HOUR_S and two.from_s - first_s >= SHORT.warm_up_s


@pytest.mark.parametrize("variant", [MIXED, BY_TENANT])
@pytest.mark.parametrize(("trace", "load"), [("philly", 0.1), ("openb", 0.8)])
def test_a_case_offers_its_load(data: Path, tmp_path: Path, trace: str, load: float, variant: str) -> None:
    """The replayed trace offers the given load within a tenth; levels 1 and 2 offer at most about half of the fleet."""
    case = ExperimentCase(trace, load, 0, variant)
    build(case, data, tmp_path, SHORT)
    facts = json.loads((case.folder(tmp_path) / "case.json").read_text())
    offered = {1: 0.0, 0: 0.0}
    rows = read_trace(f"csv:{case.folder(tmp_path) / 'trace.csv'}").rows
    first_s = min(row.submit_s for row in rows)
    for row in rows:
        at_s = row.submit_s - first_s
        span_s = min(facts["measure_to_s"], at_s + row.duration_s) - max(facts["measure_from_s"], at_s)
        assert row.priority is not None
        offered[int(row.priority <= 2)] += max(0.0, span_s) * row.gpus
    whole = facts["gpus"] * SHORT.measured_s
    assert sum(offered.values()) / whole == pytest.approx(load, rel=0.1)
    assert offered[1] / whole <= 0.55


@pytest.mark.long
def test_every_policy_keeps_within_the_bound(all_outcomes: Path) -> None:
    """No set of the highest levels does more work than the bound allows; the best policy does most of it."""
    case = ExperimentCase("openb", 1.3, 0, BY_TENANT)
    most = {
        int(level): gpu_h for level, gpu_h in json.loads((case.folder(all_outcomes) / "bound.json").read_text()).items()
    }
    parts = []
    for policy in POLICIES:
        body = json.loads((case.folder(all_outcomes) / f"{policy}.json").read_text())
        done = PolicyResult(case, policy, body)
        for level, gpu_h in most.items():
            assert done.worked_gpu_h(range(1, level + 1)) <= gpu_h * 1.001, (policy, level)
        parts.append(done.worked_gpu_h() / most[max(most)])
    assert max(parts) > 0.8


def test_the_bound_is_that_of_the_linear_program() -> None:
    """On random workloads, the bound by flow equals the optimum of a linear solver."""
    chance = random.Random(3)
    for _ in range(5):
        fluids = [
            Fluid(
                chance.choice((1, 4)), chance.randint(0, 5000), chance.randint(60, 6000), chance.choice((1, 2, 8)), "a"
            )
            for _ in range(12)
        ]
        found = most_gpu_h(fluids, {"a": 8}, 9000.0)
        assert found[4] == pytest.approx(_linear(fluids, 8, 9000.0) / 3600, rel=1e-3)


def _linear(fluids: list[Fluid], slots: int, until_s: float) -> float:
    solver = pywraplp.Solver.CreateSolver("GLOP")
    buckets = int(until_s // BUCKET_S)
    rates = {}
    for k, one in enumerate(fluids):
        for bucket in range(buckets):
            there_s = (bucket + 1) * BUCKET_S - max(bucket * BUCKET_S, one.arrives_s)
            rates[k, bucket] = solver.NumVar(0, one.gpus * max(0.0, there_s), "")
        solver.Add(sum(rates[k, bucket] for bucket in range(buckets)) <= one.gpus * one.duration_s)
    for bucket in range(buckets):
        solver.Add(sum(rates[k, bucket] for k in range(len(fluids))) <= slots * BUCKET_S)
    solver.Maximize(sum(rates.values()))
    assert solver.Solve() == solver.OPTIMAL
    return float(solver.Objective().Value())


def test_priorities_count(outcomes: Path) -> None:
    """At this load, `fifo` misses objectives of the highest levels more than twice as often as `global`."""
    case = ExperimentCase("openb", 1.3, 0, MIXED)
    found = {
        policy: misses(
            [PolicyResult(case, policy, json.loads((case.folder(outcomes) / f"{policy}.json").read_text()))], "award"
        )
        for policy in ("global", "fifo")
    }
    assert found["global"].judged > 20
    assert found["global"].percent < found["fifo"].percent / 2


def test_waits_that_are_unfinished_are_judged_at_the_end() -> None:
    """An unfinished wait is missed if it is longer than its objective, else it is not judged.

    A wait is unavoidable if provisioning alone exceeds the objective.
    """
    assert Wait(1, 8, True, 301.0, False, 0.0).missed is True
    assert Wait(1, 8, True, 300.0, False, 0.0).missed is None
    assert Wait(7, 8, True, 9e9, True, 0.0).missed is None
    assert (Wait(1, 8, True, 400.0, True, 350.0).missed, Wait(1, 8, True, 400.0, True, 350.0).avoidable) == (
        True,
        False,
    )
    assert Wait(1, 8, True, 400.0, True, 250.0).avoidable


@pytest.mark.parametrize(
    ("ran", "policies"),
    [("outcomes", ("global", "fifo")), pytest.param("all_outcomes", POLICIES, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_the_report_keeps_the_words_around_its_tables(
    request: pytest.FixtureRequest, tmp_path: Path, ran: str, policies: Sequence[str]
) -> None:
    """The text outside of the report's markers is kept; each policy has its rows, and charts are written beside it."""
    report = tmp_path / "docs" / "experiments.md"
    report.parent.mkdir()
    report.write_text(f"# Mine\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    for _ in range(2):
        write_report(request.getfixturevalue(ran), report)
    text = report.read_text()
    assert text.startswith("# Mine\n\nBefore.\n\n") and text.endswith("\n\nAfter.\n") and "old" not in text
    assert text.count(BEGIN) == text.count(END) == 1
    for policy in policies:
        assert f"| {policy} | 1.3 |" in text
    for name in ("misses", "waits"):
        assert (report.parent / "experiments" / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_the_command_goes_on_where_it_was(data: Path, tmp_path: Path, checkout: Path, outcomes: Path) -> None:
    """Existing outcomes are not computed again; a folder without traces is an error that names the missing file."""
    assert [case_of(case.name) for case in cases()] == list(cases())
    missing = subprocess.run(
        [sys.executable, "-m", "research.experiments", "--data", tmp_path, "--out", tmp_path / "out",
         "--report", tmp_path / "r.md", "--seeds", "0", "--loads", "0.8", "--jobs", "1"],
        cwd=checkout, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    assert missing.returncode == 1 and "philly.csv" in missing.stdout
    folder = ExperimentCase("openb", 1.3, 0).folder(outcomes)
    again = subprocess.run(
        [sys.executable, checkout / "research/experiments/replay.py", folder, "global"],
        cwd=checkout, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    assert again.stdout == ""
