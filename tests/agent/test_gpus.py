"""Whether GPUs are free, with device files and a `nvidia-smi` of the test."""

import contextlib
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
    (tmp_path / "dev").mkdir()
    for gpu in range(2):
        (tmp_path / "dev" / f"nvidia{gpu}").touch()
    _memory(tmp_path, 3, 12)
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/memory\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    yield tmp_path


BUSES = ("00000000:3F:00.0", "00000000:B1:00.0")


def _memory(root: Path, *used_mebibytes: int) -> None:
    """Writes what the program says: number, bus and used memory of each GPU."""
    lines = [f"{number}, {BUSES[number]}, {used}\n" for number, used in enumerate(used_mebibytes)]
    (root / "memory").write_text("".join(lines))


def _driver(root: Path, bus: str, minor: object, **more: str) -> None:
    """Writes what the driver shows of a GPU."""
    file = root / "proc/driver/nvidia/gpus" / bus / "information"
    file.parent.mkdir(parents=True)
    about = {"Model": "NVIDIA A40", "GPU UUID": f"GPU-{minor}", "Bus Location": bus, "Device Minor": minor, **more}
    file.write_text("".join(f"{name}: \t {value}\n" for name, value in about.items()))


@contextlib.contextmanager
def _holder(device: Path) -> Iterator[int]:
    """Yields the id of a process that has a device open."""
    code = f"file = open({str(device)!r}); print('open', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
    try:
        yield holder.pid
    finally:
        holder.kill()
        holder.communicate()


def test_device_files_in_another_order_than_the_bus(devices: Path) -> None:
    """The driver tells which device file belongs to which GPU. A GPU that it excludes has no number."""
    _driver(devices, "0000:b1:00.0", 0)
    _driver(devices, "0000:3f:00.0", 1)
    _driver(devices, "0000:1a:00.0", 2, **{"GPU Excluded": "Yes"})
    (devices / "dev" / "nvidia2").touch()
    with _holder(devices / "dev" / "nvidia1") as pid:
        assert gpu_use([0], devices).holders == (pid,)
        assert gpu_use([1], devices).is_free
    _memory(devices, 3, 40000)
    assert (gpu_use([0], devices).is_free, gpu_use([1], devices).used_bytes) == (True, {1: 40000 << 20})
    with _holder(devices / "dev" / "nvidia2"):
        assert gpu_use([0, 2], devices).is_free, "the excluded GPU is not one of the machine"


def test_a_driver_that_shows_something_else(devices: Path) -> None:
    """If the driver's file has another form, the number of the device file is that of the GPU."""
    _driver(devices, "0000:b1:00.0", "?")
    _driver(devices, "0000:3f:00.0", 1)
    with _holder(devices / "dev" / "nvidia1") as pid:
        assert gpu_use([1], devices).holders == (pid,)
        assert gpu_use([0], devices).is_free


def test_a_gpu_is_free_when_no_process_has_it_open(devices: Path) -> None:
    """A process that has the device open is named until it ends; the other GPU is free meanwhile."""
    assert gpu_use([0, 1], devices).is_free
    with _holder(devices / "dev" / "nvidia1") as pid:
        assert gpu_use([0, 1], devices).holders == (pid,)
        assert gpu_use([0], devices).is_free
    until(lambda: gpu_use([0, 1], devices).is_free)


def test_a_gpu_is_free_when_its_memory_reads_free(devices: Path) -> None:
    """A GPU with used memory is not free; a `nvidia-smi` that fails or says nonsense is told apart."""
    _memory(devices, 3, 40000)
    assert gpu_use([0, 1], devices).used_bytes == {1: 40000 << 20}
    (devices / "memory").write_text("no devices were found\n")
    found = gpu_use([0], devices)
    assert found.unknown is not None and found.unknown.startswith("nvidia-smi failed")
    assert not found.is_free, "nobody knows whether its memory is free"


def test_declared_gpus_have_no_devices(tmp_path: Path) -> None:
    """A machine without device files has nothing that could be held."""
    assert gpu_use(range(8), tmp_path) == gpu_use([], tmp_path)
