"""The agent's activities against a real Temporal server, with real tasks."""

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity

from agent import old_attempts, tasks
from agent.outcomes import forget_outcomes
from agent.state import StateFolder
from agent.tasks import TaskState
from domain.ids import machine_workflow_id
from domain.protocol.activities import Activity
from domain.protocol.machines import Attend, NodeOutcome, RunNode
from domain.task_reports import LoadReport
from tests.agent.harness import PYTHON, STUBBORN, Lab, description, digest, processes_of, sealed_for, until_async


async def test_a_short_task_needs_no_heartbeat(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that ends before the first heartbeat is due sends none, and its end is detected without polling."""
    config = lab.config(heartbeat_interval_s=300.0, poll_interval_s=300.0)
    launch = description(lab.region, config, "exit 0")
    key = lab.write(launch)
    beats: list[tuple[Any, ...]] = []
    monkeypatch.setattr(activity, "heartbeat", lambda *details: beats.append(details))
    async with lab.agent(config):
        request = RunNode(
            launch.workload_id, 1, config.machine, key, lab.bucket_url, {}, digest(launch), leads_jobs=["main"]
        )
        pending = await lab.start(Activity.RUN_NODE, config.machine, request, heartbeat_timeout_s=1200.0)
        outcome: NodeOutcome = await pending.result(NodeOutcome)
    assert [end.exit_code for end in outcome.exits] == [0]
    assert beats == []


async def test_a_gang_runs_to_the_end(lab: Lab) -> None:
    """The tasks of a node end with their exit codes, their progress is in the heartbeat, and their logs are shipped."""
    config = lab.config()
    report = json.dumps({"step": 7, "resumed_step": 5, "checkpoint": None, "at_s": 1.0})
    wait = "while [ ! -e go ]; do sleep 0.05; done"
    first = f"echo '{report}' > $MIZZEN_REPORT; echo hello from $RANK at $MASTER_ADDR:$MASTER_PORT; {wait}"
    launch = description(lab.region, config, first, f"cat note.txt; {wait}", files={"note.txt": "a note\n"})
    lab.write(launch)
    async with lab.agent(config):
        prepared = await lab.prepare(launch, config.machine, ["main"])
        again = await lab.prepare(launch, config.machine, ["main"])
        assert prepared == again
        assert (prepared.machine, prepared.address) == (config.machine, "127.0.0.1")
        assert config.ports[0] <= prepared.ports["main"] <= config.ports[1]
        pending = await lab.run(launch, config.machine, {"main": f"127.0.0.1:{prepared.ports['main']}"})

        async def beating() -> Any:
            while not ((beat := await pending.heartbeat()) and beat["progress"][0]["step"]):
                await asyncio.sleep(0.1)
            return beat

        beat = await asyncio.wait_for(beating(), 20)
        assert beat["running"] == 2
        assert [(p["step"], p["resumed_step"]) for p in beat["progress"]] == [(7, 5), (None, None)]
        for task in range(2):
            (lab.folder_of(launch, config, task=task).work / "go").touch()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert sorted((e.job, e.task, e.exit_code, e.signal) for e in outcome.exits) == [
            ("main", 0, 0, None),
            ("main", 1, 0, None),
        ]
        assert (outcome.machine, outcome.stopped) == (config.machine, False)
        assert outcome.progress[0].step == 7
        await until_async(lambda: lab.log(launch, task=0)[1] and lab.log(launch, task=1)[1])
    hello = f"hello from 0 at 127.0.0.1:{prepared.ports['main']}\n".encode()
    assert lab.log(launch, task=0)[0] == hello
    assert lab.log(launch, task=1)[0] == b"a note\n"


async def test_a_failure_stops_the_siblings(lab: Lab) -> None:
    """When one task fails, the other tasks of its node are stopped, and the failure is the first of the exits."""
    config = lab.config()
    launch = description(lab.region, config, "sleep 600", "echo broken >&2; exit 3", "sleep 600")
    lab.write(launch)
    async with lab.agent(config):
        outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
        await until_async(lambda: lab.log(launch, task=1)[1])
    assert [(e.task, e.exit_code, e.signal) for e in outcome.exits[:1]] == [(1, 3, None)]
    assert sorted((e.task, e.signal) for e in outcome.exits[1:]) == [(0, 15), (2, 15)]
    assert lab.log(launch, task=1)[0] == b"broken\n"
    assert not outcome.stopped
    assert processes_of(lab.folder) == []


async def test_stop_leaves_nothing(lab: Lab) -> None:
    """After the grace period, stop kills processes that ignore the notice, in every session.

    Both run and stop report `stopped` immediately, even with a long poll interval.
    """
    config = lab.config(poll_interval_s=300.0)
    launch = description(
        lab.region,
        config,
        f"exec {PYTHON} stubborn.py",
        "trap 'echo saved; exit 0' TERM; echo ready; while true; do sleep 0.05; done",
        "exit 0",
        files={"stubborn.py": STUBBORN},
    )
    lab.write(launch)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        outputs = [lab.folder_of(launch, config, task=task).output for task in (0, 1)]
        await until_async(lambda: all(path.exists() and b"ready" in path.read_bytes() for path in outputs))
        await until_async(lambda: lab.folder_of(launch, config, task=2).exit())
        stopped = await lab.stop(launch, config.machine, 0.5)
        assert processes_of(lab.folder) == []
        outcome: NodeOutcome = await running.result(NodeOutcome)
        again = await lab.stop(launch, config.machine, 0.5)
    for told in (stopped, outcome, again):
        assert told.stopped
        ends = {e.task: (e.exit_code, e.signal) for e in told.exits}
        assert ends == {0: (None, 9), 1: (0, None), 2: (0, None)}
    assert lab.folder_of(launch, config, task=1).output.read_text().endswith("\nsaved\n")


async def test_a_stopped_attempt_is_refused(lab: Lab) -> None:
    """After a stop, this attempt and older ones are rejected for good, even if it never ran or the agent restarts."""
    config = lab.config()
    launch = description(lab.region, config, "true", attempt=3)
    older = description(lab.region, config, "true", workload_id=launch.workload_id, attempt=2)
    newer = description(lab.region, config, "true", workload_id=launch.workload_id, attempt=4)
    for each in (launch, older, newer):
        lab.write(each)
    async with lab.agent(config):
        outcome = await lab.stop(launch, config.machine, 5.0)
        assert (outcome.stopped, outcome.exits) == (True, [])
    async with lab.agent(config):
        for each in (launch, older):
            failure = await (await lab.run(each, config.machine)).failure()
            assert (failure.type, failure.non_retryable) == ("StoppedAttempt", True)
            assert "attempt 3 was stopped" in str(failure)
        outcome = await (await lab.run(newer, config.machine)).result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [0]


async def test_a_newer_attempt_ends_an_older_one(lab: Lab) -> None:
    """Tasks of an older attempt that still run are killed before a newer attempt's tasks start."""
    config = lab.config()
    old = description(lab.region, config, "echo up; sleep 600")
    new = description(lab.region, config, "true", workload_id=old.workload_id, attempt=2)
    lab.write(old)
    lab.write(new)
    async with lab.agent(config):
        running = await lab.run(old, config.machine)
        await until_async(lambda: lab.folder_of(old, config).identities())
        await lab.prepare(new, config.machine)
        assert tasks.inspect(lab.folder_of(old, config)) is TaskState.ENDED
        assert (await running.result(NodeOutcome)).stopped
        outcome = await (await lab.run(new, config.machine)).result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [0]


async def test_a_restarted_agent_finds_its_tasks(lab: Lab) -> None:
    """A stopped agent detaches; the next one finds running tasks and tasks that have ended, and ships all output."""
    config = lab.config()
    launch = description(
        lab.region,
        config,
        "echo $$; while [ ! -e go ]; do sleep 0.05; done; echo done",
        "while [ ! -e go ]; do sleep 0.05; done; echo away; exit 0",
    )
    lab.write(launch)
    runs = [lab.folder_of(launch, config, task=task) for task in range(2)]
    async with lab.agent(config):
        pending = await lab.run(launch, config.machine)
        await until_async(lambda: all(run.identities() for run in runs))
        before = [run.identities() for run in runs]
    assert before[0] is not None
    inside = Path(f"/proc/{before[0][1].pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()[-1]
    assert [tasks.inspect(run) for run in runs] == [TaskState.RUNNING] * 2
    (runs[1].work / "go").touch()
    await until_async(lambda: runs[1].exit())
    async with lab.agent(config):

        async def attached() -> None:
            while (
                (state := await pending.state()) is None or state.attempt < 2 or not state.last_heartbeat_time.seconds
            ):
                await asyncio.sleep(0.1)

        await asyncio.wait_for(attached(), 20)
        (runs[0].work / "go").touch()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        await until_async(lambda: lab.log(launch, task=0)[1] and lab.log(launch, task=1)[1])
    assert [(e.task, e.exit_code) for e in outcome.exits] == [(1, 0), (0, 0)]
    assert [run.identities() for run in runs] == before
    assert lab.log(launch, task=0)[0] == f"{inside}\ndone\n".encode()
    assert lab.log(launch, task=1)[0] == b"away\n"


async def test_two_runs_of_one_attempt(lab: Lab) -> None:
    """A second `node.run` of the same attempt starts no task and returns the same outcome."""
    config = lab.config()
    launch = description(lab.region, config, "echo x >> starts; while [ ! -e go ]; do sleep 0.05; done; exit 0")
    lab.write(launch)
    run = lab.folder_of(launch, config)
    async with lab.agent(config):
        pending = [await lab.run(launch, config.machine) for _ in range(3)]
        await until_async(lambda: (run.work / "starts").exists())
        (run.work / "go").touch()
        outcomes = [await each.result(NodeOutcome) for each in pending]
    assert (run.work / "starts").read_text() == "x\n"
    assert outcomes[0] == outcomes[1] == outcomes[2]


async def test_what_tasks_report_is_masked(lab: Lab) -> None:
    """A secret in an error that a task reports is in no heartbeat, in no outcome, and in no file of the agent."""
    config = lab.config()
    state = StateFolder(config.state_dir)
    box = sealed_for(config, {"main": {"TOKEN": "hunter2-the-long-one"}})
    report = (
        """printf '{"load": {"state": "failed", "error": "no access with %s"}}' "$TOKEN" > "$MIZZEN_REPORT"; exit 9"""
    )
    launch = description(lab.region, config, report, sealed_secrets={config.machine: box})
    lab.write(launch)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        outcome: NodeOutcome = await running.result(NodeOutcome)
        assert [p.load for p in outcome.progress] == [LoadReport("failed", "no access with ***")]
        tidied, at_once = [f"{launch.workload_id}.1"], config.model_copy(update={"keep_runs_s": 0.0})
        await until_async(lambda: lab.log(launch)[1] and old_attempts.tidy(state, at_once) == tidied)
        late = await lab.stop(launch, config.machine, 0.0)
    assert late.progress == outcome.progress
    for path in config.state_dir.rglob("*.json"):
        assert b"hunter2" not in path.read_bytes()


async def test_registration_and_attendance(lab: Lab) -> None:
    """An agent sends hello with its running attempts at each start; `attend` stops the stale ones and then is ready."""
    config = lab.config(gpu_type="a100", gpus=8, hello_interval_s=0.5)
    launch = description(lab.region, config, "sleep 600")
    lab.write(launch)
    machine = lab.client.get_workflow_handle(machine_workflow_id(config.machine))

    async def hellos() -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = await machine.query("hellos")
        return heard

    async with lab.agent(config):
        await lab.run(launch, config.machine)
        await until_async(lambda: lab.folder_of(launch, config).identities())
        first = (await hellos())[0]
        assert first["machine"] == config.machine and first["gpus"] == 8 and first["gpu_type"] == "a100"
        assert first["runs"] == []
    async with lab.agent(config):

        async def heard_again() -> list[dict[str, Any]]:
            while not (found := [h for h in await hellos() if h["runs"]]):
                await asyncio.sleep(0.1)
            return found

        second = (await asyncio.wait_for(heard_again(), 20))[0]
        assert second["runs"] == [f"{launch.workload_id}.1"]
        assert (second["incarnation"], second["public_key"]) == (first["incarnation"], first["public_key"])
        old = Attend(config.machine, "an earlier boot", [])
        failure = await (await lab.start(Activity.ATTEND, config.machine, old)).failure()
        assert (failure.type, failure.non_retryable) == ("OtherIncarnation", True)
        attending = await lab.start(
            Activity.ATTEND, config.machine, Attend(config.machine, first["incarnation"], second["runs"])
        )

        async def ready() -> None:
            while await attending.heartbeat() != "ready":
                await asyncio.sleep(0.1)

        await asyncio.wait_for(ready(), 20)
        assert processes_of(lab.folder) == []
        count = len(await hellos())
        await asyncio.sleep(1.2)  # While `attend` runs, the agent sends no more hellos.
        assert len(await hellos()) == count
    await attending.handle.terminate()
    await machine.terminate()


async def test_a_bucket_that_is_away_harms_no_task(lab: Lab) -> None:
    """Tasks run and end while output cannot be shipped; the next agent ships all of it when the bucket is available."""
    config = lab.config()
    launch = description(lab.region, config, "echo before; while [ ! -e go ]; do sleep 0.05; done; echo after")
    lab.write(launch)
    bucket = lab.folder / "bucket"
    async with lab.agent(config):
        await lab.prepare(launch, config.machine)
        bucket.rename(lab.folder / "away")
        bucket.write_text("not a folder")
        pending = await lab.run(launch, config.machine)
        (lab.folder_of(launch, config).work / "go").touch()
        outcome: NodeOutcome = await pending.result(NodeOutcome)
        assert [e.exit_code for e in outcome.exits] == [0]
    bucket.unlink()
    (lab.folder / "away").rename(bucket)
    async with lab.agent(config):
        await until_async(lambda: lab.log(launch)[1])
    assert lab.log(launch)[0] == b"before\nafter\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start tasks as another user")
async def test_tasks_of_another_user(temporal_address: str, request: pytest.FixtureRequest) -> None:
    """With `run_as`, tasks run as that user in folders that belong to it, and their reports and logs arrive."""
    root = Path(tempfile.mkdtemp())  # Not below pytest's folder, which only its owner may enter.
    request.addfinalizer(lambda: shutil.rmtree(root))
    root.chmod(0o755)
    async with Lab.open(root, temporal_address) as lab:
        config = lab.config(run_as="nobody")
        script = "id -un; touch new; echo more >> given.txt; cat given.txt; echo '{\"step\": 3}' > $MIZZEN_REPORT"
        launch = description(lab.region, config, script, files={"given.txt": "given\n"})
        lab.write(launch)
        async with lab.agent(config):
            outcome: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
            await until_async(lambda: lab.log(launch)[1])
        assert [e.exit_code for e in outcome.exits] == [0]
        assert lab.log(launch)[0] == b"nobody\ngiven\nmore\n"
        assert outcome.progress[0].step == 3
        assert processes_of(root) == []


async def test_finished_runs_are_tidied(lab: Lab) -> None:
    """A run's folder is removed some time after everything is shipped, and a late retry is rejected.

    The outcome is kept for longer, because a workflow may need it after Temporal's state was lost.
    """
    config = lab.config()
    launch = description(lab.region, config, "echo x")
    lab.write(launch)
    state = StateFolder(config.state_dir)
    async with lab.agent(config):
        await (await lab.run(launch, config.machine)).result(NodeOutcome)
        assert old_attempts.tidy(state, config) == []
        tidied, at_once = [f"{launch.workload_id}.1"], config.model_copy(update={"keep_runs_s": 0.0})
        await until_async(lambda: lab.log(launch)[1] and old_attempts.tidy(state, at_once) == tidied)
        assert state.attempts() == []
        failure = await (await lab.run(launch, config.machine)).failure()
        assert failure.type == "StoppedAttempt"
        late = await lab.stop(launch, config.machine, 0.0)
        assert ([e.exit_code for e in late.exits], late.stopped) == ([0], False)
        forget_outcomes(state, 0.0)
        assert (await lab.stop(launch, config.machine, 0.0)).exits == []


@pytest.mark.parametrize("code", [0, 3])
async def test_a_stop_that_comes_too_late_tells_the_truth(lab: Lab, code: int) -> None:
    """Tasks that ended by themselves before the stop, with any exit code, are not reported as stopped."""
    config = lab.config()
    launch = description(lab.region, config, f"exit {code}")
    lab.write(launch)
    async with lab.agent(config):
        await (await lab.run(launch, config.machine)).result(NodeOutcome)
        late = await lab.stop(launch, config.machine, 0.0)
    assert ([e.exit_code for e in late.exits], late.stopped) == ([code], False)


@pytest.mark.parametrize("grace_s", [0.0, 30.0])
async def test_stop_in_the_middle_of_a_start(lab: Lab, grace_s: float) -> None:
    """A stop during a start leaves no process, whether the tasks had been started before it or not."""
    config = lab.config()
    launch = description(lab.region, config, *["sleep 600"] * 6)
    lab.write(launch)
    async with lab.agent(config):
        running = await lab.run(launch, config.machine)
        stopped = await lab.stop(launch, config.machine, grace_s)
        assert stopped.stopped and all(e.signal in (9, 15) for e in stopped.exits)
        try:
            outcome = await running.result(NodeOutcome)
            assert outcome.stopped
        except AssertionError:
            raise
        except Exception:
            assert (await running.failure()).type == "StoppedAttempt"
        # A shim removes the folders of the sandbox after it has recorded the end.
        await until_async(lambda: processes_of(lab.folder) == [])
