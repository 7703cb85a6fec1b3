"""Agents notice what is wrong with GPUs, with a library of the test."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from agent import gpu_watch
from agent.state import StateFolder
from domain.ids import machine_workflow_id
from domain.protocol.machines import NodeOutcome
from tests.agent.fake_gpus import FakeGpus, gpu
from tests.agent.harness import Lab, description, until_async
from tests.agent.test_device_rules import _with_slots


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
    watch = gpu_watch.GpuWatch(StateFolder(config.state_dir), config.machine, 1)
    assert watch.fault is not None and not watch._look(gpu_watch.nvml.Xids(), counts=True)
    fake_gpus.write(gpu(0, ecc=3), gpu(1, ecc=9))
    async with lab.agent(config):
        await _told(lab, config.machine, "3 uncorrectable memory errors")


async def test_a_gpu_whose_memory_is_not_freed_takes_no_work(
    lab: Lab, fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is withheld, also by the next agent, and new tasks are refused, until the memory is free.

    Memory of a process that was there before the task does not count.
    """
    monkeypatch.setattr(gpu_watch, "_FREE_S", 0.3)
    config = lab.config(gpus=2, gpu_type="a100")
    desktop = f"{os.getppid()}:900"
    free, left = (gpu(0, 900, processes=desktop), gpu(1)), (gpu(0, 1900, processes=desktop), gpu(1))

    async def runs() -> str:
        launch = description(lab.region, config, "exit 0")
        lab.write(launch)
        pending = await lab.run(launch, config.machine, attempts=1)
        try:
            outcome: NodeOutcome = await pending.result(NodeOutcome)
        except WorkflowFailureError:
            return str(await pending.failure())
        return "" if outcome.exits[0].succeeded else "failed"

    fake_gpus.write(*free)
    async with lab.agent(config):
        assert await runs() == ""
        fake_gpus.write(*left)
        assert await runs() == ""
        assert "memory of GPUs of" in await runs()
        await _unfreed(lab, config.machine, 0b01)
    async with lab.agent(config):
        assert "memory of GPUs of" in await runs()
        fake_gpus.write(gpu(0, 0, processes=f"{2**22 + 1}:1"), gpu(1))
        assert "memory of GPUs of" in await runs(), "a process that has ended, but not for the driver"
        fake_gpus.write(*free)
        await _unfreed(lab, config.machine, 0)
        assert await runs() == ""


async def test_stopped_tasks_that_leave_memory(lab: Lab, fake_gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop of an attempt waits for the memory, too. Slots of other running tasks are not judged.

    A slot that is found while the watch looks at the others stays withheld.
    """
    left = gpu_watch.GpuWatch._left

    def slowly(slots: Mapping[int, int]) -> dict[int, int]:
        found = left(slots)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(gpu_watch.GpuWatch, "_left", staticmethod(slowly))
    monkeypatch.setattr(gpu_watch, "_FREE_S", 0.3)
    config = lab.config(gpus=2, gpu_type="a100")
    launches = [_with_slots(description(lab.region, config, "sleep 600"), (slot,)) for slot in (0, 1)]
    async with lab.agent(config):
        for launch in launches:
            lab.write(launch)
            await lab.run(launch, config.machine)
            await until_async(lab.folder_of(launch, config).started_at_s)
        fake_gpus.write(gpu(0, 70000), gpu(1, 70000))
        await lab.stop(launches[0], config.machine, 0.0)
        await _unfreed(lab, config.machine, 0b01)
        await lab.stop(launches[1], config.machine, 0.0)
        await _unfreed(lab, config.machine, 0b11)
        await asyncio.sleep(1.0)
        await _unfreed(lab, config.machine, 0b11)


async def _unfreed(lab: Lab, machine: str, slots: int) -> None:
    """Waits until the last registration of a machine has this mask of unfreed slots."""
    async with asyncio.timeout(30.0):
        while not (heard := await _hellos(lab, machine)) or heard[-1]["unfreed"] != slots:
            await asyncio.sleep(0.1)


@pytest.mark.rotating
async def test_heartbeats_have_the_use_of_gpus(lab: Lab, fake_gpus: FakeGpus) -> None:
    """Each task with GPUs reports their memory and how busy they are, in steps; a task without GPUs does not."""
    fake_gpus.write(gpu(0, 10_000, percent=88), gpu(1, 20_050, percent=99))
    config = lab.config(gpus=2, gpu_type="a100", heartbeat_interval_s=0.1)
    launch = _with_slots(description(lab.region, config, "sleep 600", "sleep 600"), (0, 1), ())
    lab.write(launch)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        async with asyncio.timeout(30.0):
            while not (said := await running.heartbeat()) or said["progress"][0]["gpu"] is None:
                await asyncio.sleep(0.1)
        await lab.stop(launch, config.machine, 0.0)
    step = 1 << 27
    assert said["progress"][0]["gpu"] == {"gpus": 2, "percent": 95, "used_bytes": round((30_050 << 20) / step) * step}
    assert said["progress"][1]["gpu"] is None
