"""Agents notice what is wrong with GPUs, with a library of the test."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.service import RPCError

from agent import gpu_watch
from agent.state import StateFolder
from domain.ids import machine_workflow_id
from tests.agent.fake_gpus import FakeGpus, gpu
from tests.agent.harness import Lab


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents look often."""
    monkeypatch.setattr(gpu_watch, "_LOOK_S", 0.05)
    monkeypatch.setattr(gpu_watch, "_COUNT_EVERY", 1)


async def _hellos(lab: Lab, machine: str) -> list[dict[str, Any]]:
    workflow = lab.client.get_workflow_handle(machine_workflow_id(machine))
    heard: list[dict[str, Any]] = []
    with contextlib.suppress(RPCError):  # The agent has not said anything yet.
        heard = await workflow.query("hellos", result_type=list[dict[str, Any]])
    return heard


async def _told(lab: Lab, machine: str, error: str, again: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Waits until the machine's workflow knows a fault, and returns it. Meanwhile calls `again`."""
    async with asyncio.timeout(30.0):
        while True:
            again()
            for hello in await _hellos(lab, machine):
                if hello["gpu_fault"] is not None and hello["gpu_fault"]["error"].startswith(error):
                    fault: dict[str, Any] = hello["gpu_fault"]
                    return fault
            await asyncio.sleep(0.1)


async def test_faults_are_told_and_those_of_programs_are_not(lab: Lab, fake_gpus: FakeGpus) -> None:
    """Errors that programs cause say nothing about the GPU. The next agent of this boot still knows the fault."""
    config = lab.config(gpus=2, gpu_type="a100")
    lines = [gpu(1), gpu(0)]

    def fails(*xids: str) -> None:
        lines.extend(xids)
        fake_gpus.write(*lines)

    fails()
    async with lab.agent(config):
        first = await _told(lab, config.machine, "Xid 79: it has fallen off", lambda: fails("xid 0 79"))
        assert (first["slot"], first["gpu"]) == (1, "GPU-1")
        fails("xid 1 31", "xid 0 13", "xid 1 43", "xid 1 94")
        second = await _told(lab, config.machine, "Xid 94")
        assert (second["slot"], second["gpu"]) == (0, "GPU-0")
        heard = await _hellos(lab, config.machine)
        told = {hello["gpu_fault"]["error"][:6] for hello in heard if hello["gpu_fault"] is not None}
        assert told == {"Xid 79", "Xid 94"}
    async with lab.agent(config):
        async with asyncio.timeout(30.0):
            while (again := await _hellos(lab, config.machine)) == heard:
                await asyncio.sleep(0.1)
    assert again[-1]["gpu_fault"] == second


async def test_uncorrectable_errors_are_told_when_they_increase(lab: Lab, fake_gpus: FakeGpus) -> None:
    """What an earlier agent of this boot has counted is not told again."""
    config = lab.config(gpus=1, gpu_type="a100")
    fake_gpus.write(gpu(0, ecc=2), gpu(1, ecc=9))
    async with lab.agent(config):
        first = await _told(lab, config.machine, "2 uncorrectable memory errors")
        assert (first["slot"], first["gpu"]) == (0, "GPU-0"), "the machine does not offer the other GPU"
    watch = gpu_watch.GpuWatch(StateFolder(config.state_dir), 1)
    assert watch.fault is not None and not watch._look(gpu_watch.nvml.Xids(), counts=True)
    fake_gpus.write(gpu(0, ecc=3), gpu(1, ecc=9))
    async with lab.agent(config):
        await _told(lab, config.machine, "3 uncorrectable memory errors")
