"""The harness of the benches: interleaving, medians, bars, output and exit codes."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from rich.console import Console

from bench import command
from bench.harness import Bench, Figure, Line, Suite, exponent, interleave, medians, missing, seconds, timed

AT_MOST, AT_LEAST, TOLD = Line("low", 2.0), Line("high", 3.0, at_least=True), Line("told", None)


def _figure(suite: str, line: Line, ratio: float) -> Figure:
    return Figure(suite, line, ratio, {"a_s": 0.123456, "b_s": 1.0}, 7, {"rows": 1000, "kind": "x"})


def _suite(name: str, *ratios: tuple[Line, float]) -> Suite:
    def run(_: Bench) -> Iterable[Figure]:
        return [_figure(name, line, ratio) for line, ratio in ratios]

    return Suite(name, tuple(line for line, _ in ratios), run)


def _quiet(rounds: int) -> Bench:
    return Bench(rounds, lambda _: None)


@pytest.mark.long
def test_things_take_turns() -> None:
    """Each round runs every thing once, in the same order; the warm-up comes first and is not counted."""
    calls: list[str] = []

    def thing(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = interleave(_quiet(3), {"a": lambda: thing("a"), "b": lambda: thing("b")})
    assert calls == ["a", "b"] * 4
    assert found == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_a_thing_may_measure_several() -> None:
    """A thing that returns a mapping is reported under the names of the mapping."""
    found = interleave(_quiet(2), {"pair": lambda: {"x": 1.0, "y": 2.0}, "z": lambda: 3.0}, warm_ups=0)
    assert found == {"x": [1.0, 1.0], "y": [2.0, 2.0], "z": [3.0, 3.0]}


def test_an_outlier_does_not_move_the_median() -> None:
    """One slow round of seven does not change the median."""
    assert medians({"a": [1, 1, 900, 1, 1, 1, 1]}) == {"a": 1.0}


@pytest.mark.parametrize(
    ("line", "ratio", "holds"),
    [
        (AT_MOST, 2.0, True), (AT_MOST, 2.001, False), (AT_LEAST, 3.0, True), (AT_LEAST, 2.999, False),
        (TOLD, 9.0, None), (AT_MOST, float("nan"), False), (AT_LEAST, float("nan"), False),
    ],
)  # fmt: skip
def test_a_bar_is_reached_at_its_value(line: Line, ratio: float, holds: bool | None) -> None:
    """A ratio that equals its bar holds, a ratio beyond it does not, and NaN never does."""
    assert _figure("s", line, ratio).holds is holds


def test_the_exponent_is_that_of_a_power() -> None:
    """The exponent of times that grow as a power of the size is that power, for any constant factor."""
    sizes = (1, 2, 4, 8, 16)
    assert exponent(sizes, [3.5 * k**1.37 for k in sizes]) == pytest.approx(1.37)


def test_the_collector_comes_back() -> None:
    """Timed code runs without the garbage collector, which is enabled again afterwards, even after an error."""
    import gc

    seen: list[bool] = []
    seconds(lambda: seen.append(gc.isenabled()))
    with pytest.raises(ZeroDivisionError):
        seconds(lambda: 1 / 0)
    assert seen == [False] and gc.isenabled()


def test_calls_in_a_row() -> None:
    """A short call is repeated as often as requested in each round, and its time is that of one call."""
    calls: list[int] = []
    once_s = timed(lambda: calls.append(1), times=50)()
    assert len(calls) == 50 and once_s >= 0


def test_a_figure_as_json() -> None:
    """A figure is one line of JSON with everything that is needed to judge it."""
    text = _figure("s", AT_MOST, 2.5).to_json()
    assert "\n" not in text
    assert json.loads(text) == {
        "suite": "s", "line": "low", "ratio": 2.5, "bar": 2.0, "bound": "at most", "holds": False,
        "absolute": {"a_s": 0.1235, "b_s": 1.0}, "rounds": 7, "sizes": {"rows": 1000, "kind": "x"},
    }  # fmt: skip
    assert json.loads(_figure("s", TOLD, float("inf")).to_json())["ratio"] is None


def test_names_and_beginnings_select() -> None:
    """A name selects one suite and a prefix all suites that have it, in the order of the table, each once."""
    names = list(command.SUITES)
    assert command.chosen(None, names) == [name for name in names if name != "gpu-saves"]
    assert command.chosen("rms", names) == ["rms-bid", "rms-preempt", "rms-grow"]
    assert command.chosen("memory, gms-scan,gms", names) == ["gms-scan", "gms-reference", "gms-tick", "memory"]
    for wrong in ("nothing", "rms-bid,", ""):
        with pytest.raises(click.UsageError, match="must be a name or prefix of gms-scan"):
            command.chosen(wrong, names)


def test_every_suite_is_what_its_name_says() -> None:
    """Each module's suite has the name under which it is listed, lines with different names, and a bar.

    Suites that measure mainly the disk have no bar.
    """
    for suite in command.load(list(command.SUITES)):
        assert suite.name in command.SUITES
        assert len({line.name for line in suite.lines}) == len(suite.lines)
        assert suite.name in ("award", "gms-tick") or any(line.bar is not None for line in suite.lines)


def test_exit_codes() -> None:
    """The exit code is 0 if every bar is reached, and 1 if a line misses its bar or has no figure.

    The JSON output has one line per figure.
    """
    good, told = _suite("good", (AT_MOST, 1.0), (AT_LEAST, 4.0)), _suite("told", (TOLD, 99.0))
    out = io.StringIO()
    assert command.run([good, told], 7, [out]) == 0
    assert [json.loads(line)["line"] for line in out.getvalue().splitlines()] == ["low", "high", "told"]
    assert command.run([good, _suite("bad", (AT_MOST, 3.0))], 7, []) == 1
    silent = Suite("silent", (TOLD,), lambda _: [])
    assert command.run([silent], 7, []) == 1


def test_a_suite_that_fails_does_not_keep_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """An error in one suite is shown and its lines are missing; the suites after it still run."""

    def broken(_: Bench) -> Iterator[Figure]:
        yield _figure("broken", AT_MOST, 1.0)
        raise RuntimeError("the suite failed")

    suites = [Suite("broken", (AT_MOST, AT_LEAST), broken), _suite("good", (AT_MOST, 1.0))]
    out = io.StringIO()
    assert command.run(suites, 7, [out]) == 1
    assert [json.loads(line)["suite"] for line in out.getvalue().splitlines()] == ["broken", "good"]
    said = capsys.readouterr().err
    assert "the suite failed" in said and "missing  broken: high" in said


def test_a_pipe_is_not_filled_with_one_phase() -> None:
    """Progress of the same phase is written only at intervals; a new phase, or a line without a phase, immediately."""
    out, clock = io.StringIO(), iter((0.0, 1.0, 2.0, 3.0, 3.1, 4.0, 13.9, 14.0))
    progress = command.Progress(out, lambda: next(clock))
    progress.suite = "s"
    for text in ("walk: 1", "walk: 2", "swap: 3", "round 1", "round 2", "walk: 4", "walk: 5", "walk: 6"):
        progress(text)
    said = ["walk: 1", "swap: 3", "round 1", "round 2", "walk: 4", "walk: 6"]
    assert out.getvalue().splitlines() == [f"s: {text}" for text in said]


def test_an_interruption_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C exits with 130, shows the existing figures, and names the missing lines."""

    def interrupted(_: Bench) -> Iterator[Figure]:
        yield _figure("stopped", AT_MOST, 1.0)
        raise KeyboardInterrupt

    suites = [Suite("stopped", (AT_MOST, AT_LEAST), interrupted), _suite("later", (TOLD, 1.0))]
    assert command.run(suites, 7, []) == 130
    said = capsys.readouterr().err
    assert "missing  stopped: high" in said and "missing  later: told" in said
    assert "missing  stopped: low" not in said


def test_the_table_says_what_falls_short() -> None:
    """Without a terminal, the table is plain text, and a line that misses its bar is marked."""
    out = io.StringIO()
    command.show([_figure("s", AT_MOST, 3.0), _figure("s", AT_LEAST, 3.0)], [], Console(file=out, highlight=False))
    low, high = [line for line in out.getvalue().splitlines() if line.startswith("s ")]
    assert "FALLS SHORT" in low and "≤ 2" in low and "a_s 0.1235" in low
    assert "holds" in high and "≥ 3" in high and "\x1b" not in out.getvalue()


def test_missing_lines() -> None:
    """`missing` returns the lines of the chosen suites that have no figure."""
    assert list(missing([_suite("s", (AT_MOST, 1.0), (TOLD, 1.0))], [_figure("s", TOLD, 1.0)])) == ["s: low"]


def _bench(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command_line, cwd=checkout, capture_output=True, text=True, check=False, timeout=120)


def test_an_unknown_suite_names_those_there_are(checkout: Path) -> None:
    """An unknown suite exits with code 2 and a message that lists all suites."""
    done = _bench(checkout, "--suite", "rms-bid,gsm")
    assert done.returncode == 2 and done.stdout == ""
    assert "'gsm'" in done.stderr and all(name in done.stderr for name in command.SUITES)


def test_one_suite_from_end_to_end(checkout: Path, tmp_path: Path) -> None:
    """Standard output has only JSON lines, the file has the same lines, and the exit code agrees with them."""
    path = tmp_path / "figures.jsonl"
    done = _bench(checkout, "--suite", "gms-reference", "--rounds", "1", "--json", str(path))
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert path.read_text() == done.stdout
    assert {f["suite"] for f in figures} == {"gms-reference"} and all(f["rounds"] == 1 for f in figures)
    assert all(np.isfinite(f["ratio"]) and f["ratio"] > 0 for f in figures)
    assert done.returncode == (1 if any(f["holds"] is False for f in figures) else 0)
    assert "round 1 of 1" in done.stderr


def test_ctrl_c(checkout: Path) -> None:
    """SIGINT from a terminal ends a run immediately with exit code 130 and the names of the missing lines."""
    command_line = [sys.executable, "-m", "bench", "--suite", "gms-scan"]
    process = subprocess.Popen(
        command_line, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert "gms-scan" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    assert "missing  gms-scan: pass over argsort" in err
