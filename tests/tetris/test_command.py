"""`mizzen tetris solve` and `score`, and `python -m research.tetris`, as a user runs them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from infra.errors import ConfigurationError
from research.tetris.__main__ import generate
from server.outputs import STANDARD, check_outputs, write_json
from server.tetris_commands import tetris
from tests.tetris.small import small_instance
from tetris import documents

MIZZEN = [str(Path(sys.executable).parent / "mizzen"), "tetris"]


def run(*arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process and returns its result."""
    return subprocess.run([*MIZZEN, *map(str, arguments)], input=text, capture_output=True, text=True, check=False)


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """Writes a small instance to a file and returns its path."""
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(documents.instance_document(small_instance(8, 20, 4, 40))))
    return path


@pytest.mark.rotating
def test_solve_then_score(instance: Path, tmp_path: Path) -> None:
    """The plan of `solve` scores better than the start, and its moves report their gains."""
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
    """Runs the command in this process, because starting a process takes seconds."""
    command, *rest = map(str, arguments)
    if command == "generate":
        return CliRunner().invoke(generate, rest)
    return CliRunner().invoke(tetris, [command, *rest], input=text)


@pytest.mark.long
def test_a_pipe_and_a_folder(instance: Path, tmp_path: Path) -> None:
    """Documents may come from standard input and go to standard output; large instances are folders of Parquet."""
    solved = here("solve", "-", "--method", "v0", text=instance.read_text())
    assert json.loads(solved.stdout) == {"version": 1, "homes": {}}
    made = here("generate", "--tables", 60, "--regions", 4, "--out", tmp_path / "large")
    assert made.exit_code == 0, made.stderr
    plan = tmp_path / "plan.json"
    assert here("solve", tmp_path / "large", "--time-s", 0.2, "--out", plan).exit_code == 0
    replicas = tmp_path / "replicas.json"
    again = here("solve", tmp_path / "large", "--method", "v0", "--out", tmp_path / "none.json", "--replicas", replicas)
    assert "jobs have no region with their data and hardware" in again.stderr
    written = json.loads(replicas.read_text())
    assert {r["reason"] for r in written["replicas"]} <= {"disaster_recovery", "no_region", "hot"}
    assert written["replicas"]
    scored = here("score", tmp_path / "large", plan)
    assert json.loads(scored.stdout)["violations"] == []


def test_replicas_of_partitions(tmp_path: Path) -> None:
    """A document beside the instance has the partitions that jobs read; one of another instance is rejected."""
    plan, replicas, reads = (tmp_path / f"{name}.json" for name in ("plan", "replicas", "reads"))
    given, other = tmp_path / "given.json", tmp_path / "other.json"
    regions = [{"name": name, "storage_bytes": 100, "gpu_hours": hours} for name, hours in (("r", {}), ("s", {"a": 1}))]
    job = {"name": "j", "kind": "ml", "tables": ["t"], "gpu_type": "a", "gpu_hours": 1, "priority": 1}
    tables = [{"name": "t", "size_bytes": 40, "home": "r"}, {"name": "u", "size_bytes": 90, "home": "s"}]
    given.write_text(json.dumps({"version": 1, "regions": regions, "tables": tables, "jobs": [job]}))
    reads.write_text('{"version": 1, "partitions": {"t/ds=1": 10}, "reads": [{"job": "j", "partitions": ["t/ds=1"]}]}')
    solve = ("solve", given, "--method", "v0", "--out", plan, "--replicas", replicas, "--reads")
    done = here(*solve, reads)
    assert (done.exit_code, "0 of 1 jobs have no region" in done.stderr) == (0, True)
    (told,) = [r for r in json.loads(replicas.read_text())["replicas"] if r["reason"] == "no_region"]
    assert (told["region"], told["part"], told["partitions"], told["job"]) == ("s", 0.25, ["t/ds=1"], "j")
    other.write_text(reads.read_text().replace('"j"', '"k"'))
    refused = here(*solve, other)
    assert refused.exit_code == 2
    assert f"{other}: reads: 'k' is not a job of the instance; export both again" in refused.stderr


def test_errors_are_one_line_and_change_nothing(instance: Path, tmp_path: Path) -> None:
    """Unusable input is an error of one line with exit code 2, and no file changes."""
    plan = tmp_path / "plan.json"
    body = json.loads(instance.read_text())
    body["tables"][3]["home"] = "nowhere"
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(body))
    bad.with_suffix(".txt").write_text("mine")
    was = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments, said in (
        (("solve", bad, "--out", plan), "tables.3.home: 'nowhere' is not a region of the instance"),
        (("solve", tmp_path / "no.json", "--out", plan), f"{tmp_path / 'no.json'}: No such file or directory; give"),
        (("solve", instance, "--time-s", -1, "--out", plan), "'--time-s': -1.0 is not in the range x>=0"),
        (("solve", instance, "--time-s", "nan", "--out", plan), "'--time-s': nan must be a finite number"),
        (("solve", instance, "--seed", -1, "--out", plan), "'--seed': -1 is not in the range x>=0"),
        (("solve", instance, "--out", tmp_path / "no" / "plan.json"), "does not exist"),
        (("solve", instance, "--out", tmp_path), f"--out: {tmp_path}: is a folder: give a file"),
        (("solve", instance, "--out", f"{plan}/"), "ends with a slash"),
        (("solve", instance, "--out", "/proc/plan.json"), "--out: /proc/plan.json: cannot create a file in its folder"),
        (("solve", instance, "--out", plan, "--moves", tmp_path / "x" / ".." / "plan.json"), "is also --out"),
        (("solve", instance, "--replicas", instance), "--replicas: " + f"{instance}: is also INSTANCE"),
        (("solve", instance, "--moves", "-"), "--moves: standard output: is also --out"),
        (("solve", instance, "-o", "json"), "No such option '-o'"),
        (("score", instance, instance), "homes: missing"),
        (("score", "-", "-"), "both standard input"),
        (("generate", "--regions", 1, "--out", plan), "'--regions': 1 is not in the range x>=3"),
        (("generate", "--seed", -1, "--out", plan), "'--seed': -1 is not in the range x>=0"),
        (("generate", "--out", instance / "folder"), "does not exist"),
        (("generate", "--out", bad.with_suffix(".txt")), "is a file: give a folder"),
        (("generate", "--out", f"{bad}/"), "ends with a slash"),
    ):
        refused = here(*arguments)
        assert (refused.exit_code, refused.stdout) == (2, ""), refused.stderr
        assert said in refused.stderr
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == was


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """A document is written atomically and keeps the mode of the previous file; a failed write leaves no file."""
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    with pytest.raises(TypeError):
        write_json(path, {"homes": object()})
    assert path.read_text() == "before"
    check_outputs(
        {"--out": link, "--moves": Path("/dev/null"), "--replicas": Path("/dev/null")}, {"INSTANCE": STANDARD}
    )
    write_json(link, {"homes": {}})
    assert link.is_symlink() and json.loads(path.read_text()) == {"homes": {}}
    assert path.stat().st_mode & 0o777 == 0o640
    assert {p.name for p in tmp_path.iterdir()} == {"plan.json", "link.json"}
    with pytest.raises(ConfigurationError, match="No space left on device"):
        write_json(Path("/dev/full"), {})


def test_a_full_disk_is_told(instance: Path, tmp_path: Path) -> None:
    """A failed write to standard output is an error of one line; code may be compiled before."""
    (tmp_path / "plan.json").write_text('{"version": 1, "homes": {}}')
    with Path("/dev/full").open("w") as full:
        command = [*MIZZEN, "score", str(instance), str(tmp_path / "plan.json")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    *first, last = done.stderr.splitlines()
    assert (done.returncode, last) == (2, "mizzen: standard output: No space left on device")
    assert all(line.startswith("mizzen: compiling") for line in first)


@pytest.mark.rotating
@pytest.mark.parametrize("searches", [True, False])
def test_an_interrupt(tmp_path: Path, searches: bool) -> None:
    """Ctrl-C exits with 130: during the search with the best plan so far, before it with one line of text."""
    instance = tmp_path / "instance.json"  # Too many tables for a proof before the interrupt.
    instance.write_text(json.dumps(documents.instance_document(small_instance(8, 60, 4, 150))))
    plan = tmp_path / "plan.json"
    command = [*MIZZEN, "solve", str(instance), "--time-s", "600", "--out", str(plan)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as it:
        assert it.stderr is not None
        said = it.stderr.readline()
        assert "loading the search" in said
        if searches:
            # The first progress line is written when the search starts.
            said = it.stderr.readline()
        it.send_signal(signal.SIGINT)
        said += it.stderr.read()
        assert it.wait(60) == 130, said
    if searches:
        assert "interrupted: this is the best plan so far" in said
        assert here("score", instance, plan).exit_code == 0
    else:
        assert said.endswith("mizzen: interrupted: nothing is written\n") and "Traceback" not in said
        assert not plan.exists()


def test_placing_needs_no_solver() -> None:
    """CP-SAT is imported only by the search that uses it."""
    code = "import sys, tetris.climb, tetris.exact, tetris.placement_run; sys.exit('ortools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
