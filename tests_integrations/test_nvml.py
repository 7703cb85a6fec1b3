"""What the agent reads of a real GPU, through NVML."""

import subprocess
import sys

import pytest
import torch

from agent import nvml
from agent.gpus import gpu_use, numbered_gpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
_HOLD = "import torch; held = torch.ones(1 << 28, device='cuda'); print('held', flush=True); input()"


def test_a_process_that_holds_memory_is_found() -> None:
    """A GPU has an identity, a type and memory; the memory and the process of a training are those of its use."""
    shown = nvml.devices()
    assert shown and numbered_gpus() == shown
    assert shown[0].uuid.startswith("GPU-") and shown[0].pci and shown[0].memory_bytes > 1 << 30
    before = nvml.uses()
    with subprocess.Popen([sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"held\n"
        uses, use = nvml.uses(), gpu_use([0])
        process.stdin.close()
    assert before and uses
    print(shown, before, uses, use)
    assert uses[0].used_bytes - before[0].used_bytes >= 1 << 30
    assert process.pid in use.holders and not use.is_free


def test_a_healthy_gpu_reports_no_errors() -> None:
    """It has no uncorrectable memory errors and no critical Xid events."""
    assert not any(nvml.uncorrected_errors().values())
    assert nvml.Xids().read() == []
