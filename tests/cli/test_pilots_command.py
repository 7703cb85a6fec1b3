"""Wrong options of `mizzen pilots`, and a computer without Slurm: one line says what is wrong. Nothing is submitted."""

from pathlib import Path

import pytest

from mizzen_client.cli.app import run
from tests.cli.service import Capture

_START = [
    "pilots", "--slurm", "--nodes", "1", "--partition", "batch", "--region", "hpc", "--gateway", "localhost:7443"
]  # fmt: skip


@pytest.fixture(autouse=True)
def _without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--memory", "lots"], "'--memory': lots: must be a size such as"),
        (["--gateway", "localhost"], "'--gateway': localhost: must be HOST:PORT"),
        (["--time", "soon"], "'--time': soon: must be a duration"),
        (["--time", "54d"], "'--time': 54d: must be at most 53d"),
        (["--time", "1m"], "mizzen: --time: must be at least 120"),
        (["--partition", "a b"], "mizzen: --partition: must match"),
        (["--folder", "/dev/null/pilots"], "mizzen: --folder: [Errno 20] Not a directory"),
        (["--gpu-type", "a100", "--gpus", "99"], "'--gpus': 99 is not in the range"),
    ],
)
def test_wrong_options_are_named(capsys: Capture, options: list[str], says: str) -> None:
    """The message has the option's name on the command line, not that of a setting behind it."""
    code = run([*_START, *options])
    said = capsys.readouterr().err
    assert code == 2
    assert says in said


@pytest.mark.parametrize("command", [["ls"], ["stop", "--all"]])
def test_no_slurm(capsys: Capture, command: list[str]) -> None:
    """Without Slurm's commands, or its controller, one line says so."""
    code = run(["pilots", *command])
    assert (code, capsys.readouterr().err) == (1, "mizzen: slurm: squeue: there is no such program in PATH\n")
