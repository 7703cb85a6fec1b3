"""Ending a process while its threads still run."""

import os
import subprocess
import sys
from pathlib import Path

ENDS = """
import atexit, logging, sys, threading, time
from logging.handlers import MemoryHandler
from infra.process_exit import end_process

threading.Thread(target=time.sleep, args=(600.0,)).start()
atexit.register(print, "torn down")
held = MemoryHandler(100, target=logging.FileHandler(sys.argv[1]))
logging.getLogger().addHandler(held)
logging.getLogger().warning("the last record")
print("x" * 1_000, end="")
print("the last line", file=sys.stderr, end="")
end_process(7)
"""


def ending(log: Path, stdout: int) -> subprocess.CompletedProcess[str]:
    """Runs the program above until it ends, and returns the result."""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", ENDS, str(log)]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=buffered
    )


def test_all_is_written_and_no_thread_is_waited_for(tmp_path: Path) -> None:
    """Exit status, output and log are complete; running threads are not joined, and exit handlers are not called."""
    log = tmp_path / "log"
    done = ending(log, subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (7, "x" * 1_000, "the last line")
    assert log.read_text() == "the last record\n"


def test_a_reader_that_has_gone_does_not_change_the_status(tmp_path: Path) -> None:
    """The exit status is the same if standard output is a broken pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    done = ending(tmp_path / "log", writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (7, "the last line")
