"""GPUs as NVML shows them, with a library of the test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent import nvml
from agent.gpus import gpu_use, numbered_gpus
from infra.errors import ConfigurationError
from server.agents import _gpus
from tests.agent.fake_gpus import FakeGpus, gpu


def test_gpus_and_their_use(fake_gpus: FakeGpus) -> None:
    """GPUs are in the order of the bus, whatever their device files; each has a type, memory and an identity."""
    fake_gpus.write(gpu(1, 40000, percent=93, processes="4000000:39000 4000001:12"), gpu(0, 3))
    found = numbered_gpus()
    assert [(one.minor, one.pci, one.uuid, one.type) for one in found] == [
        (7, "0000:10:00.0", "GPU-0", "a100"),
        (6, "0000:11:00.0", "GPU-1", "a100"),
    ]
    assert found[0].memory_bytes == 80 << 30
    assert gpu_use([0]).is_free
    use = gpu_use([0, 1, 7])
    assert (use.holders, use.used_bytes, use.unknown) == ((4000000, 4000001), {1: 40000 << 20}, None)
    uses = nvml.uses()
    assert uses is not None and (uses[1].percent, uses[1].process_bytes[4000000]) == (93, 39000 << 20)


def test_own_processes_do_not_count(fake_gpus: FakeGpus) -> None:
    """This process has the GPUs open to ask about them."""
    fake_gpus.write(gpu(0, processes=f"{os.getpid()}:1"))
    assert gpu_use([0]).is_free


def test_without_a_driver_files_are_read(fake_gpus: FakeGpus) -> None:
    """If the library says that there is no driver, or breaks later, the GPUs are those of the device files."""
    fake_gpus.file.unlink()
    assert nvml.devices() is None and nvml.uses() is None
    fake_gpus.write(gpu(0))
    assert [one.uuid for one in nvml.devices() or ()] == ["GPU-0"]
    fake_gpus.file.unlink()
    assert nvml.devices() is None and nvml.uses() is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti"), ("NVIDIA L40S", "l40s"), ("NVIDIA H100 NVL", "h100"),
    ],
)  # fmt: skip
def test_types(name: str, expected: str) -> None:
    """The type is the product without its maker, its memory and its form."""
    assert nvml.Gpu(0, name=name).type == expected


def test_options_of_an_agent(fake_gpus: FakeGpus, caplog: pytest.LogCaptureFixture) -> None:
    """Without options the GPUs are those of the driver; options have precedence."""
    assert _gpus(None, None) == (2, "a100")
    assert _gpus(1, None) == (1, "a100")
    assert _gpus(None, "fast") == (2, "fast")
    assert _gpus(0, None) == (0, None)
    assert not caplog.messages
    assert _gpus(3, "a100") == (3, "a100")
    assert caplog.messages == ["--gpus: 3, but NVML shows only 2 GPUs"]
    fake_gpus.write(gpu(0), gpu(1).replace("A100-SXM4-80GB", "L40S"))
    with pytest.raises(ConfigurationError, match="types a100, l40s"):
        _gpus(None, None)
    assert _gpus(1, "a100") == (1, "a100")
    fake_gpus.write()
    assert _gpus(None, None) == (0, None)
    with pytest.raises(ConfigurationError, match="give both"):
        _gpus(2, None)


def test_another_process_loads_the_library_by_name(fake_gpus: FakeGpus) -> None:
    """Where the system finds the library by its name, a new process uses it; elsewhere the binding is not imported."""
    code = "import sys; from agent import nvml; print(len(nvml.devices() or ()), 'pynvml' in sys.modules)"
    where = {"PYTHONPATH": str(Path(nvml.__file__).parents[1])}
    for more, said in ((fake_gpus.env, "2 True"), ({}, "0 False")):
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, env=where | more, capture_output=True, text=True, check=True)
        if more or not Path("/dev/nvidiactl").exists():
            assert done.stdout.strip() == said
