"""The polls of an agent are closed when the owner takes its machine: real agent, real Temporal server."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowFailureError

from agent import tasks
from agent.config import AgentConfig
from agent.lending import polls
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.ids import machine_workflow_id
from domain.protocol.activities import Activity
from domain.protocol.machines import Attend, NodeOutcome
from tests.agent.harness import Lab, Pending, description, until_async

OWNER = str(os.getuid())


async def _owner(config: AgentConfig, *arguments: str) -> None:
    """Runs the owner's command line."""
    mizzen, path = Path(sys.executable).parent / "mizzen", config.state_dir / "owner.sock"
    command = [str(mizzen), *arguments, "--socket", str(path)]
    await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60, check=True)


async def _scheduled(pending: Pending) -> None:
    """Waits until the activity has been scheduled."""
    kind = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    while not any(event.event_type == kind for event in (await pending.handle.fetch_history()).events):
        await asyncio.sleep(0.02)


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Waits until `holds` returns True."""
    async with asyncio.timeout(20.0):
        while not await holds():
            await asyncio.sleep(0.02)


async def test_polls_are_closed_at_the_owners_word(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poll that is open may still bring one request, and no other one arrives while the polls are closed."""
    for name in ("KNOWN_S", "CLOSED_S"):
        monkeypatch.setattr(polls, name, 600.0)
    config = lab.config(owner=OWNER)
    launches = [description(lab.region, config, "exit 0") for _ in range(8)]
    for launch in launches:
        lab.write(launch)
    async with lab.agent(config):
        await (await lab.run(launches[0], config.machine)).result(NodeOutcome)
        await _owner(config, "reclaim", "--now")
        sent = [await lab.run(launch, config.machine, attempts=1) for launch in launches[1:]]
        for one in sent:
            await _scheduled(one)
        await asyncio.sleep(1.0)
        arrived = [one for one in sent if await one.state() is None]
        assert len(arrived) <= 1
        for one in arrived:
            assert "has taken the machine back" in str(await one.failure())
        await _owner(config, "lend")
        for one in sent:
            if one not in arrived:
                await one.result(NodeOutcome)


async def test_polls_open_again_when_the_machine_is_free(lab: Lab) -> None:
    """The control plane can confirm that nothing runs, and what it still sends is refused."""
    config = lab.config(owner=OWNER)
    launch, other = (description(lab.region, config, "sleep 600") for _ in range(2))
    for one in (launch, other):
        lab.write(one)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        await until_async(lambda: tasks.inspect(lab.folder_of(launch, config)) is TaskState.RUNNING)
        await _owner(config, "reclaim", "--now")
        assert (await lab.stop(launch, config.machine, 0.0)).exits
        assert "has taken the machine back" in str(await (await lab.run(other, config.machine, attempts=1)).failure())
        await running.result(NodeOutcome)


async def test_what_is_lent_again_soon_is_registered(lab: Lab) -> None:
    """The agent says that the machine is lent also if both happen while it waits for the next `machine.attend`."""
    config = lab.config(owner=OWNER, attend_interval_s=0.1)
    async with lab.agent(config):
        await until_async((config.state_dir / "owner.sock").exists)
        attend = Attend(config.machine, StateFolder(config.state_dir).incarnation(), [])
        first, _ = [await lab.start(Activity.ATTEND, config.machine, attend) for _ in range(2)]
        workflow = lab.client.get_workflow_handle(machine_workflow_id(config.machine))

        async def attends() -> bool:
            return await first.heartbeat() is not None

        async def is_lent() -> bool:
            hello = (await workflow.query("hellos", result_type=list[dict[str, Any]]))[-1]
            return bool(hello["at_s"] > taken_at_s and not hello["taken"])

        await _until(attends)
        await first.handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await first.handle.result()
        await asyncio.sleep(0.5)  # The agent learns it with its next heartbeat, and then waits for three seconds.
        taken_at_s = time.time()
        await _owner(config, "reclaim", "--now")
        await _owner(config, "lend")
        await _until(is_lent)
