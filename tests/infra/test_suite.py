"""The suite itself: a test that hangs or kills its worker costs that test, not the run."""

import subprocess
import sys
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
