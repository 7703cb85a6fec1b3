"""A machine is reclaimed with notice while its task serves: requests in progress continue, and the stop is in time."""

import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agent import tasks
from agent.config import AgentConfig
from agent.lending.lender import Lender
from agent.locks import StartLocks
from agent.notices import MachineNotices
from agent.ports import SERVING
from agent.state import StateFolder
from agent.tasks import RunFolder, TaskState
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import PYTHON, Lab, description, until_async
from tests.agent.test_lending import OWNER, _mizzen
from tests.agent.test_notices import told

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "server.py"
_TOKENS = 30


def _serving(lab: Lab, config: AgentConfig) -> tuple[LaunchDescription, RunFolder]:
    launch = description(
        lab.region, config, f"exec {PYTHON} server.py", grace_s=30.0,
        files={"server.py": EXAMPLE.read_text()}, serving={"probe": {"path": "/health", "interval_s": 0.5}},
    )  # fmt: skip
    lab.write(launch)
    return launch, lab.folder_of(launch, config)


async def _opened(lab: Lab, launch: LaunchDescription, config: AgentConfig) -> Any:
    """Waits until the server answers, and returns a stream of three seconds whose first bytes have arrived."""
    folder = lab.folder_of(launch, config).path.parent

    def ask() -> Any:
        ports = json.loads((folder / "ports.json").read_text())
        url = f"http://127.0.0.1:{ports[SERVING]}/generate?tokens={_TOKENS}&pause_ms=100"
        stream = urllib.request.urlopen(url, timeout=30)
        stream.readline()
        return stream

    run = lab.folder_of(launch, config)
    await until_async(lambda: run.output.exists() and "listening" in run.output.read_text())
    return await asyncio.to_thread(ask)


@pytest.mark.rotating
async def test_streams_go_on_after_a_platforms_notice(lab: Lab, tmp_path: Path) -> None:
    """The server gets SIGTERM shortly before the end that the platform has announced, not at once."""
    notice = tmp_path / "notice"
    config = lab.config(platform="file", notice_file=notice)
    launch, run = _serving(lab, config)
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        stream = await _opened(lab, launch, config)
        notice.write_text(json.dumps({"ends_at": time.time() + 60, "words": "taken"}))
        await asyncio.wait_for(told(lab, config), 30)
        text = (await asyncio.to_thread(stream.read)).decode()
        assert text.count("data: ") == _TOKENS + 1 and text.endswith("data: [DONE]\n\n")
        assert tasks.inspect(run) is TaskState.RUNNING
        ends_at_s = time.time() + 4
        notice.write_text(json.dumps({"ends_at": ends_at_s, "words": "sooner"}))
        outcome: NodeOutcome = await pending.result(NodeOutcome)
    (end,) = outcome.exits
    assert (end.exit_code, end.signal, outcome.stopped) == (0, None, True)
    assert outcome.notice is not None and outcome.notice.platform == "file"


@pytest.mark.rotating
async def test_streams_go_on_after_an_owners_notice(lab: Lab) -> None:
    """The owner gets the machine at the announced time, and streams that end before are not cut."""
    config = lab.config(gpus=1, gpu_type="g", owner=OWNER)
    launch, run = _serving(lab, config)
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        stream = await _opened(lab, launch, config)
        reclaiming = asyncio.create_task(_mizzen(config, "reclaim", "--notice", "10s"))
        text = (await asyncio.to_thread(stream.read)).decode()
        assert text.count("data: ") == _TOKENS + 1 and text.endswith("data: [DONE]\n\n")
        assert tasks.inspect(run) is TaskState.RUNNING and not reclaiming.done()
        status = await reclaiming
        assert (status["free"], status["running"]) == (True, [])
        outcome: NodeOutcome = await pending.result(NodeOutcome)
    assert [(end.exit_code, end.signal) for end in outcome.exits] == [(0, None)]
    assert outcome.notice is not None and outcome.notice.platform == "owner"


async def test_a_repeated_reclaim_does_not_delay_the_stop(tmp_path: Path) -> None:
    """Five seconds before the end a task that serves is told, also if the owner has repeated the request meanwhile."""
    now_s = [1000.0]
    config = AgentConfig(
        machine="r/c/m", region="r", cluster="c", rack="k", cpus_milli=1000, memory_bytes=1 << 30, address="a",
        ports=(21000, 21099), state_dir=tmp_path / "state", gpus=1, gpu_type="g",
    )  # fmt: skip
    state = StateFolder(config.state_dir)
    launch = description("r", config, "exit", grace_s=30.0, serving={})
    folder = state.attempt(launch.workload_id, launch.attempt)
    folder.save_launch(launch.model_dump_json().encode(), f"file://{tmp_path}")
    lender = Lender(config, state, MachineNotices(None, {}), StartLocks(), clock=lambda: now_s[0])
    told = folder.run("main", 0).exit
    await lender.reclaim(None, 100.0)
    assert told() is None
    now_s[0] += 96.0
    await lender.reclaim(None, 100.0)
    assert told() is not None
