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


def test_it_runs_in_a_new_folder_and_again_in_the_same(tmp_path: Path) -> None:
    """A run in a folder that does not exist, and one in its folder, place workloads; an interrupt ends them."""
    folder, log = tmp_path / "demo", tmp_path / "log"
    for what in ("starting", "placed in"):
        with log.open("w") as file, subprocess.Popen(_demo(folder), cwd=ROOT, stdout=file, stderr=file) as demo:
            wait_until(lambda what=what, demo=demo: what in log.read_text() or demo.poll() is not None, what)
            demo.send_signal(signal.SIGINT)
            assert demo.wait(90) == 130, log.read_text()
        assert what in log.read_text()


@pytest.mark.long
def test_everything_holds(tmp_path: Path) -> None:
    """A whole run ends with exit code 0 and a report."""
    done = subprocess.run(_demo(tmp_path / "demo"), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything holds" in done.stdout
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()


@pytest.mark.rotating
def test_the_folder_of_another_is_left_alone(tmp_path: Path) -> None:
    """A folder with files that no demo has made is refused, and keeps them."""
    (tmp_path / "thesis").write_text("mine")
    done = subprocess.run(_demo(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"{tmp_path} contains thesis and was not created by a demo" in done.stderr
    assert (tmp_path / "thesis").read_text() == "mine"
