"""The suite itself: a test that hangs or kills its worker costs that test, not the run; and each test has its turn."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CONFTEST = """
from tests import running
from tests.running import pytest_configure, pytest_runtest_teardown, pytest_xdist_make_scheduler

running._TEARDOWN_S = 1
"""
HANGS = """
import pathlib
import time

import pytest


@pytest.fixture
def hangs_once():
    yield
    mark = pathlib.Path("hung")
    if not mark.exists():
        mark.touch()
        time.sleep(600)


def test_fails_and_hangs(hangs_once):
    assert pathlib.Path("hung").exists()


def test_last():
    pathlib.Path("last").touch()
"""


@pytest.mark.long
def test_a_teardown_that_hangs_does_not_stop_the_run(tmp_path: Path, checkout: Path) -> None:
    """Its worker ends with tracebacks, another one takes over, and every test that is left runs."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hangs.py").write_text(HANGS)
    for number in range(9):  # The worker that ends has finished files.
        (tmp_path / f"test_{number}.py").write_text("def test_quick(): pass")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "xdist", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert (tmp_path / "last").exists(), done.stdout
    assert "worker 'gw" in done.stdout and "hangs_once" in done.stderr


STUCK = """
import pathlib
import time


def test_is_stuck_once():
    mark = pathlib.Path("stuck")
    if not mark.exists():
        mark.touch()
        time.sleep(600)


def test_last(): pass
"""


def test_a_test_that_is_stuck_has_failed(tmp_path: Path, checkout: Path) -> None:
    """Its tracebacks are printed, and it counts as failed, also if it passes when xdist repeats it."""
    (tmp_path / "conftest.py").write_text("from tests.running import *")
    (tmp_path / "test_stuck.py").write_text(STUCK)
    (tmp_path / "test_other.py").write_text("def test_quick(): pass")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 2\ntimeout_method = thread")
    plugins = ["-p", "xdist", "-p", "pytest_timeout"]

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    first = run("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert first.returncode == 1 and "test_is_stuck_once" in first.stderr, first.stdout
    again = run("--last-failed", "--last-failed-no-failures", "none")
    assert again.returncode == 0 and "1 passed" in again.stdout, again.stdout


ROTATES = """
import pytest


@pytest.mark.rotating
@pytest.mark.parametrize("number", range(7))
def test_rotates(number): pass


def test_always(): pass
"""
WHOLE = """
import pytest

pytestmark = pytest.mark.rotating


def test_one(): pass


def test_other(): pass
"""


def test_what_rotates_runs_in_one_of_three_turns(tmp_path: Path, checkout: Path) -> None:
    """Without a turn everything runs; in three turns each rotating test once, and a marked file as a whole."""
    (tmp_path / "conftest.py").write_text("from tests.running import pytest_collection_modifyitems")
    (tmp_path / "test_rotates.py").write_text(ROTATES)
    (tmp_path / "test_whole.py").write_text(WHOLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = rotating")

    def names(**turn: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", str(tmp_path)]
        environment = {"PYTHONPATH": str(checkout), "PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment | turn, capture_output=True, text=True, timeout=90, check=True
        )
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    everything = names()
    turns = [names(MIZZEN_TURN=str(turn)) for turn in range(3)]
    assert len(everything) == 10
    assert Counter(name for turn in turns for name in turn) == Counter(everything) + Counter({"test_always": 2})
    assert all(("test_one" in turn) == ("test_other" in turn) for turn in turns)
    assert max(map(len, turns)) <= 5
