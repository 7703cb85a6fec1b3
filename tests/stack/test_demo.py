"""`mizzen demo` (`make demo`): in a new folder, again after an interrupt, and not in the folder of somebody else."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.harness import ROOT, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]


def _demo(folder: Path) -> list[str]:
    return [str(Path(sys.executable).parent / "mizzen"), "demo", "--plain", "--data-dir", str(folder)]


def test_it_is_interrupted_and_then_runs_in_the_same_folder(tmp_path: Path) -> None:
    """The first run makes the folder and is interrupted; the second one runs to its end, and everything holds."""
    folder, log = tmp_path / "demo", tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(_demo(folder), cwd=ROOT, stdout=file, stderr=file) as first:
        wait_until(lambda: "starting" in log.read_text() or first.poll() is not None, "the stack starts")
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130, log.read_text()
    done = subprocess.run(_demo(folder), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything holds" in done.stdout
    assert "<svg" in (folder / "report.html").read_text()


def test_the_folder_of_another_is_left_alone(tmp_path: Path) -> None:
    """A folder with files that no demo has made is refused, and keeps them."""
    (tmp_path / "thesis").write_text("mine")
    done = subprocess.run(_demo(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"{tmp_path} contains thesis and was not created by a demo" in done.stderr
    assert (tmp_path / "thesis").read_text() == "mine"
