"""Runs the cases of `mizzen.integrations.jax` in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(400)
def test_the_cases_of_jax() -> None:
    """All cases pass, on four devices of one host."""
    told = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-c", HERE / "pytest.ini", "--rootdir", HERE.parent]
    ran = subprocess.run([*command, HERE / "jax_cases.py"], env=told, capture_output=True, text=True)
    assert ran.returncode == 0 and "9 passed" in ran.stdout, ran.stdout + ran.stderr
