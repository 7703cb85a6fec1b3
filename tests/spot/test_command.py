"""`mizzen spot replay`: its table, its JSON, its reproducibility, and its errors."""

import json
from pathlib import Path

import pytest

from server.spot_commands import spot
from spot.policies import POLICIES

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    for zone, period in (("x-1a", 5), ("x-1b", 7), ("y-1a", 3)):
        counts = [2 * (k % period > 0) for k in range(60)]
        body = {"metadata": {"gap_seconds": 300}, "data": counts}
        (tmp_path / "traces" / f"{zone}_v100_1.json").write_text(json.dumps(body))
    return tmp_path


def run(*arguments: str) -> int:
    """Runs the command; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        spot.main(["replay", *arguments])
    return ended.value.code or 0


USUAL = ("--traces", "traces", "--window-h", "2", "--windows", "5")


def test_table_and_json(folder: Path, capsys: Capture) -> None:
    """All policies are in the table and in the document; the same command writes the same bytes."""
    assert run(*USUAL, "--policy", "all", "--json", "out.json") == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == list(POLICIES)
    body = json.loads((folder / "out.json").read_text())
    assert [one["policy"] for one in body["policies"]] == list(POLICIES)
    assert (body["zones"], body["ticks"], body["unlimited"]) == (["x-1a", "x-1b", "y-1a"], 60, False)
    assert body["windows"] == {"ticks": 24, "count": 5, "seed": 0, "window_s": 7200.0}
    assert not body["interrupted"]
    for one in body["policies"]:
        assert len(one["windows"]) == 5
        mean = sum(window["cost"] for window in one["windows"]) / 5
        assert one["means"]["cost"]["mean"] == pytest.approx(mean)
    assert run(*USUAL, "--policy", "all", "--json", "again.json") == 0
    assert (folder / "again.json").read_bytes() == (folder / "out.json").read_bytes()


def test_options_change_the_result(folder: Path, capsys: Capture) -> None:
    """Each option has an effect; a policy that is given twice is replayed once."""

    def cost(*arguments: str) -> float:
        assert run(*USUAL, "--policy", "spothedge", "--policy", "spothedge", "--json", "-", *arguments) == 0
        (one,) = json.loads(capsys.readouterr().out)["policies"]
        return one["means"]["cost"]["mean"]

    usual = cost()
    changes = (("--target", "2"), ("--overprovision", "2"), ("--cold-start-s", "200"), ("--od-price-ratio", "2"),
               ("--seed", "1"), ("--unlimited",))  # fmt: skip
    assert usual not in [cost(*change) for change in changes]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--traces", "none"), "--traces: none: is not a folder"),
        (("--policy", "best"), "--policy: best: no such policy: give all, or one of spothedge,"),
        (("--window-h", "6"), "--window-h: 6: the trace has 60 ticks of 300 s: give 0.08333 to 5 hours"),
        (("--window-h", "0.05"), "--window-h: 0.05: the trace has 60 ticks"),
        (("--window-h", "nan"), "must be a finite number above 0"),
        (("--cold-start-s", "-1"), "-1.0: must be a finite number, 0 or more"),
        (("--od-price-ratio", "0"), "must be a finite number above 0"),
        (("--windows", "0"), "'--windows': 0 is not in the range x>=1"),
        (("--target", "0"), "'--target': 0 is not in the range x>=1"),
        (("--json", "missing/out.json"), "--json: missing/out.json: folder"),
    ],
)
def test_errors(folder: Path, capsys: Capture, arguments: tuple[str, ...], said: str) -> None:
    """An invalid option ends the command with exit code 2, and the message names the option and the value."""
    assert run(*USUAL, "--policy", "all", *arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_damaged_traces(folder: Path, capsys: Capture) -> None:
    """A damaged file, and files with different ticks, are refused by name."""
    path = folder / "traces" / "x-1b_v100_1.json"
    path.write_text(path.read_text()[:-10])
    assert run(*USUAL, "--policy", "all") == 2
    assert "--traces: traces/x-1b_v100_1.json: is not a valid trace file" in capsys.readouterr().err
    path.write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": [1]}))
    assert run(*USUAL, "--policy", "all") == 2
    assert "x-1b_v100_1.json: gap_seconds: 60: x-1a_v100_1.json has 300: all files need" in capsys.readouterr().err
