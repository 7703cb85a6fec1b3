"""Runs scripts in separate processes whose import path has the SDK but no other code of this repository."""

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
        assert time.monotonic() < end, "the condition was not met within 60 s"
        time.sleep(0.005)

def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("mizzen")]
"""


def run(script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script whose import path has the SDK but no other code of this repository."""
    command = [sys.executable, "-W", "error", *flags, "-c", BEGIN + script]
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def passes(script: str, *flags: str, **variables: str) -> str:
    """Runs the script, which must end with exit code 0; returns its standard error."""
    ended = run(script, *flags, **variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr
