"""Whether GPUs are free, with device files and a `nvidia-smi` of the test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.gpus import gpu_use
from tests.agent.harness import until


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the device files of two GPUs, and a program that reads their used memory from a file."""
    for gpu in range(2):
        (tmp_path / f"nvidia{gpu}").touch()
    (tmp_path / "memory").write_text("0, 3\n1, 12\n")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/memory\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    yield tmp_path


def test_a_gpu_is_free_when_no_process_has_it_open(devices: Path) -> None:
    """A process that has the device open is named until it ends; the other GPU is free meanwhile."""
    assert gpu_use([0, 1], devices).is_free
    code = f"file = open({str(devices / 'nvidia1')!r}); print('open', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
    assert gpu_use([0, 1], devices).holders == (holder.pid,)
    assert gpu_use([0], devices).is_free
    holder.kill()
    holder.communicate()
    until(lambda: gpu_use([0, 1], devices).is_free)


def test_a_gpu_is_free_when_its_memory_reads_free(devices: Path) -> None:
    """A GPU with used memory is not free; a `nvidia-smi` that fails or says nonsense is told apart."""
    (devices / "memory").write_text("0, 3\n1, 40000\n")
    assert gpu_use([0, 1], devices).used_bytes == {1: 40000 << 20}
    (devices / "memory").write_text("no devices were found\n")
    found = gpu_use([0], devices)
    assert found.unknown is not None and found.unknown.startswith("nvidia-smi failed")
    assert not found.is_free, "nobody knows whether its memory is free"


def test_declared_gpus_have_no_devices(tmp_path: Path) -> None:
    """A machine without device files has nothing that could be held."""
    assert gpu_use(range(8), tmp_path) == gpu_use([], tmp_path)
