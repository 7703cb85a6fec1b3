"""Platform notices: received by the agent or by a task, passed to tasks immediately, and forwarded to the server."""

import asyncio
import contextlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from temporalio.service import RPCError

from agent.config import AgentConfig
from agent.notices import MachineNotices
from domain.ids import machine_workflow_id
from domain.protocol.machines import NodeOutcome
from domain.task_reports import NoticeReport
from tests.agent.harness import Lab, description, until_async
from tests.sdk.clouds import Aws, Gcp, serving

TERMINATE = {"action": "terminate", "time": "2099-01-01T00:00:00Z"}
SAVES = """
import signal, sys, time
def save(*_):
    open("saved", "w").write("all")
    sys.exit({code})
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""


async def told(lab: Lab, config: AgentConfig) -> list[dict[str, Any]]:
    """Waits until the machine's workflow has received notices, and returns them."""
    workflow = lab.client.get_workflow_handle(machine_workflow_id(config.machine))
    while True:
        with contextlib.suppress(RPCError):  # The workflow starts with the agent's first signal.
            heard: list[dict[str, Any]] = await workflow.query("notices")
            if heard:
                return heard
        await asyncio.sleep(0.1)


@pytest.mark.rotating
@pytest.mark.parametrize("code", [0, 1, 143])
async def test_the_platforms_word_reaches_tasks_and_the_server(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """When AWS reclaims the machine, tasks save immediately, and the workflow and the outcome get the notice.

    This holds for every exit code of the tasks.
    """
    cloud = Aws()
    with serving(cloud) as base:
        monkeypatch.setenv("MIZZEN_AWS_METADATA", base)
        config = lab.config(platform="aws-spot")
        launch = description(
            lab.region, config, f"exec {sys.executable} -I -S trainer.py", grace_s=60.0,
            files={"trainer.py": SAVES.format(code=code)},
        )  # fmt: skip
        lab.write(launch)
        run = lab.folder_of(launch, config)
        async with lab.agent(config):
            pending = await lab.run(launch, config.machine)
            await until_async(lambda: run.output.exists() and "ready" in run.output.read_text())
            cloud.action = json.dumps(TERMINATE)
            (notice,) = (await asyncio.wait_for(told(lab, config), 30))[:1]
            outcome: NodeOutcome = await pending.result(NodeOutcome)
    assert (run.work / "saved").read_text() == "all"
    assert notice["run"] is None and notice["machine"] == config.machine
    ends_at_s = datetime(2099, 1, 1, tzinfo=UTC).timestamp()
    assert (notice["notice"]["platform"], notice["notice"]["ends_at_s"]) == ("aws", ends_at_s)
    assert [e.exit_code for e in outcome.exits] == [code]
    assert outcome.notice is not None and outcome.notice.kind == "preempt"
    assert outcome.stopped is (code == 0)  # Otherwise the attempt would count as succeeded.


async def test_a_tasks_word_is_about_its_own_attempt(lab: Lab) -> None:
    """A notice that a task reports is forwarded with its run id and is in its outcome; other tasks are not stopped."""
    config = lab.config()
    said = {"platform": "slurm", "kind": "walltime", "certain": True, "at_s": 5.0, "ends_at_s": 9e9, "words": "soon"}
    report = json.dumps({"step": 3, "notice": said})
    reports = f"echo '{report}' > $MIZZEN_REPORT; while [ ! -e go ]; do sleep 0.05; done; exit 1"
    launch, other = description(lab.region, config, reports), description(lab.region, config, "sleep 600")
    for each in (launch, other):
        lab.write(each)
    async with lab.agent(config):
        bystander = await lab.run(other, config.machine)
        pending = await lab.run(launch, config.machine)
        (notice,) = (await asyncio.wait_for(told(lab, config), 30))[:1]
        (lab.folder_of(launch, config).work / "go").touch()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert (notice["run"], notice["notice"]["words"]) == (f"{launch.workload_id}.1", "soon")
        assert outcome.notice == NoticeReport("slurm", "walltime", True, 5.0, 9e9, "soon")
        assert lab.folder_of(other, config).exit() is None
        await lab.stop(other, config.machine, 0.0)
        stopped: NodeOutcome = await bystander.result(NodeOutcome)
        assert stopped.notice is None


async def test_a_signal_that_a_task_heard_is_no_notice(lab: Lab) -> None:
    """A failure after a SIGTERM that the agent did not send, for example from a launcher, is still a failure."""
    config = lab.config()
    said = {"platform": "mizzen", "kind": "preempt", "certain": True, "at_s": 5.0, "ends_at_s": 9e9, "words": "SIGTERM"}
    launch = description(lab.region, config, f"echo '{json.dumps({'notice': said})}' > $MIZZEN_REPORT; sleep 1; exit 1")
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert outcome.notice is None
    assert outcome.progress[0].notice is not None


# --------------------------------------------------------------------------------------------- which platform is polled


def test_nobody_is_asked_unless_told_to() -> None:
    """Without a platform in the configuration or the environment, no server is polled and no notice is sent."""
    for notices in (
        MachineNotices(None, {}),
        MachineNotices("sigterm", {}),
        MachineNotices(None, {"MIZZEN_PLATFORM": ""}),
    ):
        asyncio.run(asyncio.wait_for(notices.run(), 10))
        assert (notices.current, notices.prior, notices.all("m", "boot")) == (None, None, [])


@pytest.mark.parametrize(
    ("platform", "environ", "prior"),
    [
        ("aws", {}, "aws-spot"),
        ("gcp-preemptible", {}, "gcp-preemptible"),
        ("on-demand", {}, "on-demand"),
        (None, {"MIZZEN_PLATFORM": "azure"}, "azure-spot"),
        ("slurm", {"MIZZEN_PLATFORM": "azure", "MIZZEN_GRACE_S": "5"}, "slurm"),
        ("unknown", {}, None),
    ],
)
def test_tasks_are_told_how_often_the_platform_interrupts(
    platform: str | None, environ: dict[str, str], prior: str | None
) -> None:
    """The configured platform, or else the agent's `MIZZEN_PLATFORM`, selects the interruption rate of tasks."""
    assert MachineNotices(platform, environ).prior == prior


async def test_a_platform_can_be_found_out() -> None:
    """`detect` queries the metadata servers once; the detected platform is polled, and tasks get its prior."""
    cloud = Gcp()
    cloud.values["preempted"] = "TRUE"
    with serving(cloud) as base:
        closed = "http://127.0.0.1:1"
        servers = {"MIZZEN_GCP_METADATA": base, "MIZZEN_AWS_METADATA": closed, "MIZZEN_AZURE_METADATA": closed}
        notices = MachineNotices("detect", servers)
        assert notices.prior is None
        polling = asyncio.create_task(notices.run())
        await asyncio.wait_for(notices.heard.wait(), 30)
        polling.cancel()
    assert notices.current is not None and notices.current.takes_machine
    assert notices.prior == "gcp-spot"


async def test_advice_to_leave_stops_nobody() -> None:
    """A rebalance recommendation stops no task; only a certain interruption becomes a notice."""
    cloud = Aws()
    cloud.rebalance = json.dumps({"noticeTime": "2026-01-01T00:00:00Z"})
    with serving(cloud) as base:
        notices = MachineNotices("aws", {"MIZZEN_AWS_METADATA": base})
        polling = asyncio.create_task(notices.run())
        await until_async(lambda: any("rebalance" in path for _, path in cloud.asked))
        polling.cancel()
    assert notices.current is None and not notices.heard.is_set()


@pytest.mark.rotating
async def test_a_notice_whose_end_has_passed_is_over() -> None:
    """A machine that was stopped, not terminated, runs again later: its old notice is not sent again."""
    cloud = Aws()
    cloud.action = json.dumps({"action": "hibernate", "time": "2020-01-01T00:00:00Z"})
    with serving(cloud) as base:
        notices = MachineNotices("aws", {"MIZZEN_AWS_METADATA": base})
        polling = asyncio.create_task(notices.run())
        await asyncio.wait_for(notices.heard.wait(), 30)
        assert notices.current is not None
        cloud.action = None
        await until_async(lambda: notices.current is None)
        polling.cancel()
    assert notices.all("m", "boot") == []


def test_a_platform_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """The error for an unknown platform lists the valid ones."""
    fields: dict[str, Any] = {
        "machine": "r/c/m", "region": "r", "cluster": "c", "rack": "k", "cpus_milli": 1000, "memory_bytes": 1,
        "address": "127.0.0.1", "ports": (21000, 21001), "state_dir": tmp_path,
    }  # fmt: skip
    with pytest.raises(ValidationError, match=r"platform 'moon': must be one of detect, mizzen, .*aws-spot"):
        AgentConfig.model_validate({**fields, "platform": "moon"})
    with pytest.raises(ValueError, match="MIZZEN_PLATFORM='moon'"):
        MachineNotices(None, {"MIZZEN_PLATFORM": "moon"})
