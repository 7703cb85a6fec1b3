"""The polls of an agent are closed when the owner takes its machine: real agent, real Temporal server."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType

from agent import tasks
from agent.config import AgentConfig
from agent.lending import polls
from agent.tasks import State
from domain.protocol import NodeOutcome
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
        await until_async(lambda: tasks.look(lab.folder_of(launch, config)) is State.RUNNING)
        await _owner(config, "reclaim", "--now")
        assert (await lab.stop(launch, config.machine, 0.0)).exits
        assert "has taken the machine back" in str(await (await lab.run(other, config.machine, attempts=1)).failure())
        await running.result(NodeOutcome)
