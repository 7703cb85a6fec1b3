"""A `libnvidia-ml.so.1` without a driver, compiled from `fake_nvml.c`, whose GPUs are the lines of a file."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent import nvml

_SOURCE = Path(__file__).with_name("fake_nvml.c")
_NAME = "libnvidia-ml.so.1"


@dataclass
class FakeGpus:
    """The file with the GPUs, and the folder with the library, for `LD_LIBRARY_PATH` of other processes."""

    file: Path
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Variables with which a new process uses the library."""
        return {"LD_LIBRARY_PATH": str(self.folder), "MIZZEN_FAKE_NVML": str(self.file)}

    def write(self, *lines: str) -> None:
        """Replaces the GPUs and events (`fake_nvml.c` describes a line)."""
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.file)


def gpu(index: int, used_mib: int = 0, *, percent: int = 0, ecc: int = 0, processes: str = "") -> str:
    """Returns the line of an A100, with its minor number in the reverse order of the bus."""
    name = "NVIDIA_A100-SXM4-80GB"
    return f"gpu {7 - index} {index + 16:x} GPU-{index} {name} 81920 {used_mib} {percent} {ecc} {processes}"


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    argv = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{_NAME}", "-o", str(folder / _NAME), str(_SOURCE)]
    subprocess.run(argv, check=True)
    return folder


@pytest.fixture
def fake_gpus(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus]:
    """Two GPUs, also for this process: a library that is loaded is found by its name."""
    fake = FakeGpus(tmp_path / "gpus", fake_library)
    fake.write(gpu(0), gpu(1))
    monkeypatch.setenv("MIZZEN_FAKE_NVML", str(fake.file))
    monkeypatch.setattr(nvml, "_LIBRARY", str(fake_library / _NAME))
    ctypes.CDLL(str(fake_library / _NAME))
    nvml._libraries.clear()
    yield fake
    nvml._libraries.clear()
