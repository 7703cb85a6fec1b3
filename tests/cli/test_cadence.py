"""`mizzen cadence`: explanations of the interval, output formats, and errors of options."""

import json
from pathlib import Path

import pytest
import yaml

from domain.units import parse_duration_s
from mizzen.cadence import PLATFORMS
from mizzen_client.cli.app import run

EXAMPLE = ["cadence", "--mtbf", "3h", "--save", "30s", "--step", "2s"]
SHORT = ["cadence", "--save", "30s", "--step", "2s"]


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run([*arguments, "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    body = json.loads(out)
    assert isinstance(body, dict)
    return body


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    """With an MTBF of 3 hours, saves of 30 s and steps of 2 s, five lines explain 805 s and 402 steps."""
    assert run(EXAMPLE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    for line, part in zip(lines, ("10,800 s", "30 s", "= 805 s", "402 whole steps", "7.8%"), strict=True):
        assert part in line


def test_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON and YAML have all figures and the source of the MTBF; `-o name` prints the number of steps."""
    body = told(EXAMPLE, capsys)
    assert (body["steps"], body["step_s"], body["save_s"], body["rule"]) == (402, 2.0, 30.0, "young")
    assert body["interval_s"] == pytest.approx(804.98, abs=0.01)
    found = body["mtbf"]
    assert isinstance(found, dict) and (found["mtbf_s"], found["source"]) == (10_800.0, "scheduler")
    assert run([*EXAMPLE, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == body
    assert run([*EXAMPLE, "-o", "name"]) == 0
    assert capsys.readouterr().out == "402\n"


def test_the_documentation_shows_what_it_prints(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example in docs/cadence.md is the output of its command."""
    assert run(EXAMPLE) == 0
    out = capsys.readouterr().out
    page = (checkout / "docs/cadence.md").read_text()
    assert f"    mizzen {' '.join(EXAMPLE)}\n" in page
    assert "".join(f"    {line}\n" for line in out.splitlines()) in page


def test_the_gangs_time_is_not_divided_and_the_hazard_is(capsys: pytest.CaptureFixture[str]) -> None:
    """--mtbf is of the gang and takes precedence over --hazard; a hazard or a prior is divided by --machines."""
    many = ["--machines", "100"]
    mean = [
        told([*SHORT, *more], capsys)["mtbf"]["mtbf_s"]  # type: ignore[index]
        for more in (
            ["--mtbf", "3h", "--hazard", "1", *many],
            ["--hazard", "0.01", "--platform", "spot", *many],
            ["--platform", "spot", *many],
            many,
        )
    ]
    assert mean == [10_800.0, 3600.0, PLATFORMS["spot"].hours * 36, PLATFORMS["unknown"].hours * 36]


def test_an_interval_and_a_write(capsys: pytest.CaptureFixture[str]) -> None:
    """--interval takes precedence over the formula; --write is a lower bound of the interval."""
    assert told([*EXAMPLE, "--interval", "10m"], capsys)["steps"] == 300
    assert told([*EXAMPLE, "--write", "30m"], capsys)["interval_s"] == 1800.0
    assert told([*EXAMPLE, "--interval", "0"], capsys)["steps"] == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("0.5", 0.5), ("250ms", 0.25), ("1h30m", 5400.0), ("2d", 172_800.0), ("1.5m", 90.0), ("1m30", None)],
)
def test_durations(text: str, seconds: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    """A duration is a number of seconds, or parts with a unit each, as in the API."""
    arguments = ["cadence", "--mtbf", "3h", "--save", text, "--step", "2s"]
    if seconds is None:
        assert run(arguments) == 2
    else:
        assert told(arguments, capsys)["save_s"] == seconds
        if text[-1].isalpha():
            assert parse_duration_s(text) == seconds, "the server parses another duration"


@pytest.mark.parametrize(
    ("option", "value", "right"),
    [
        ("--mtbf", "soon", "a duration such as 30s"), ("--mtbf", "0s", "more than 0"), ("--mtbf", "-3h", "more than 0"),
        ("--mtbf", "9" * 60, "a duration"), ("--save", "1e3", "0 or more"), ("--save", "", "a duration"),
        ("--step", "0", "more than 0"), ("--hazard", "0", "more than 0"), ("--hazard", "nan", "more than 0"),
        ("--hazard", "often", "a number of interruptions per machine hour"), ("--machines", "0", "x>=1"),
        ("--machines", "two", "integer"), ("--platform", "moon", "vast-interruptible"),
        ("--interval", "-1", "0 or more"), ("--write", "x", "0 or more"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(option: str, value: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For an invalid option the exit code is 2, and stderr has the option, its value and the valid values."""
    assert run([*EXAMPLE, option, value]) == 2
    out, err = capsys.readouterr()
    message = " ".join(err.split())
    assert out == "" and f"'{option}'" in message and right in message
    assert value in message


def test_a_save_and_a_step_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing --save or --step is an error that names the option."""
    for missing in ("--save", "--step"):
        at = EXAMPLE.index(missing)
        assert run([*EXAMPLE[:at], *EXAMPLE[at + 2 :]]) == 2
        assert f"'{missing}'" in capsys.readouterr().err


def test_what_never_ends_has_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """If a step is far longer than the MTBF, the overhead is null, because JSON has no infinity."""
    body = told(["cadence", "--mtbf", "1s", "--save", "1s", "--step", "1h"], capsys)
    assert body["overhead"] is None and body["steps"] == 1


def test_a_known_end(capsys: pytest.CaptureFixture[str]) -> None:
    """--ends-in divides the time left by a number of saves, which the output has."""
    body = told([*EXAMPLE, "--ends-in", "3h"], capsys)
    assert (body["rule"], body["saves"], body["steps"], body["ends_in_s"]) == ("end", 13, 400, 10_800.0)
    assert told(EXAMPLE, capsys)["ends_in_s"] is None
    assert run([*EXAMPLE, "--ends-in", "0"]) == 2
    assert "'--ends-in': '0' must be a duration" in capsys.readouterr().err


def test_the_documentation_shows_what_a_known_end_prints(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of --ends-in in docs/cadence.md is the output of its command."""
    arguments = [*EXAMPLE, "--ends-in", "3h"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    page = (checkout / "docs/cadence.md").read_text()
    assert f"    mizzen {' '.join(arguments)}\n" in page
    assert f"    {out.splitlines()[2]}\n" in page
