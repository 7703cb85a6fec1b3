"""Scripts in processes of their own, which have the SDK on their path and nothing else of ours."""

import os
import subprocess
import sys
from pathlib import Path

import mizzen

SDK = Path(mizzen.__file__).parents[1]
BEGIN = f"""
import functools, os, signal, sys, threading, time
sys.path.insert(0, {str(SDK)!r})
from mizzen import notices
from mizzen.notices.detection import PLATFORMS

def until(done):
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "waited for a minute"
        time.sleep(0.005)

def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("mizzen")]
"""


def run(script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script that has the SDK on its path and nothing else of ours."""
    command = [sys.executable, "-W", "error", *flags, "-c", BEGIN + script]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def passes(script: str, *flags: str, **variables: str) -> str:
    """What the script wrote to its standard error; it must end well."""
    ended = run(script, *flags, **variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr
