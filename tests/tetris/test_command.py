"""`mizzen tetris solve`, `score` and `generate` as a user runs them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from server.tetris_commands import tetris
from tests.tetris.small import small_instance
from tetris import documents

MIZZEN = [str(Path(sys.executable).parent / "mizzen"), "tetris"]


def run(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command's outcome."""
    return subprocess.run([*MIZZEN, *map(str, arguments)], input=text, capture_output=True, text=True, check=False)


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """A small instance's file."""
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(documents.instance_document(small_instance(8, 20, 4, 40))))
    return path


def test_solve_then_score(instance: Path, tmp_path: Path) -> None:
    """What solve writes scores better than the start, and its moves say what they gain."""
    plan, moves, nothing = tmp_path / "plan.json", tmp_path / "moves.json", tmp_path / "none.json"
    solved = run("solve", instance, "--time-s", 0.3, "--out", plan, "--moves", moves)
    assert solved.returncode == 0, solved.stderr
    assert "tables move" in solved.stderr
    nothing.write_text('{"version": 1, "homes": {}}')
    after, before = (json.loads(here("score", instance, path).stdout) for path in (plan, nothing))
    assert set(after) == {"read", "gpu", "storage", "total", "violations"}
    assert after["total"] < before["total"]
    told: list[dict[str, Any]] = json.loads(moves.read_text())["moves"]
    assert {m["table"]: m["target"] for m in told} == json.loads(plan.read_text())["homes"]
    assert sum(m["total"] for m in told) == pytest.approx(after["total"] - before["total"])


def here(*arguments: object, text: str | None = None) -> Result:
    """The same within this process: starting one takes seconds."""
    return CliRunner().invoke(tetris, [str(a) for a in arguments], input=text)


def test_a_pipe_and_a_folder(instance: Path, tmp_path: Path) -> None:
    """Documents may come from standard input and go to standard output; large ones are folders of Parquet."""
    solved = here("solve", "-", "--method", "v0", text=instance.read_text())
    assert json.loads(solved.stdout) == {"version": 1, "homes": {}}
    made = here("generate", "--tables", 60, "--regions", 4, "--out", tmp_path / "large")
    assert made.exit_code == 0, made.stderr
    plan = tmp_path / "plan.json"
    assert here("solve", tmp_path / "large", "--time-s", 0.2, "--out", plan).exit_code == 0
    replicas = tmp_path / "replicas.json"
    again = here("solve", tmp_path / "large", "--method", "v0", "--out", tmp_path / "none.json", "--replicas", replicas)
    assert "ML jobs have no region with their data and hardware" in again.stderr
    written = json.loads(replicas.read_text())
    assert {r["reason"] for r in written["replicas"]} <= {"disaster_recovery", "no_region", "hot"}
    assert written["replicas"]
    scored = here("score", tmp_path / "large", plan)
    assert json.loads(scored.stdout)["violations"] == []


def test_errors_are_one_line_and_change_nothing(instance: Path, tmp_path: Path) -> None:
    """What cannot be used is named, with exit code 2; no plan is written."""
    plan = tmp_path / "plan.json"
    body = json.loads(instance.read_text())
    body["tables"][3]["home"] = "nowhere"
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(body))
    for arguments, said in (
        (("solve", bad, "--out", plan), "tables.3.home: 'nowhere' is no region of the instance"),
        (("solve", tmp_path / "no.json", "--out", plan), "No such file"),
        (("solve", instance, "--time-s", -1, "--out", plan), "--time-s: -1.0"),
        (("solve", instance, "--out", tmp_path / "no" / "plan.json"), "does not exist"),
        (("score", instance, instance), "homes: Field required"),
        (("generate", "--regions", 1, "--out", plan), "--regions: 1: must be at least 3"),
    ):
        refused = here(*arguments)
        assert (refused.exit_code, refused.stdout) == (2, ""), refused.stderr
        assert said in refused.stderr
        assert not plan.exists()


def test_an_interrupt_writes_the_best_plan(instance: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the search: exit code 130, and a plan that can be scored."""
    plan = tmp_path / "plan.json"
    command = [*MIZZEN, "solve", str(instance), "--time-s", "600", "--out", str(plan)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as it:
        assert it.stderr is not None
        # Its first line comes once it searches, with Ctrl-C noted from before.
        said = it.stderr.readline()
        time.sleep(0.5)
        it.send_signal(signal.SIGINT)
        said += it.stderr.read()
        assert it.wait(60) == 130, said
    assert "interrupted: this is the best plan so far" in said
    assert here("score", instance, plan).exit_code == 0
