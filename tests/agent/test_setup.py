"""The setup script of a task: once, before the command, as the task; its failure is told apart from the command's."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent import tasks
from agent.config import AgentConfig
from agent.outcomes import outcome
from agent.task_setup import begun_at_s
from agent.tasks import RunFolder
from domain.launch import LaunchDescription
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, description, ended, process_name, processes_of, run_folder, task_launch, until

_COMMAND = ("sh", "-c", "echo command >> order; exit 4")


def _start(run: RunFolder, script: str, *argv: str) -> None:
    run.setup_script.write_text(script)
    tasks.start(run, task_launch(run, *(argv or _COMMAND), setup=("/bin/sh", "-e", str(run.setup_script))))


def _order(run: RunFolder) -> list[str]:
    return (run.work / "order").read_text().split() if (run.work / "order").exists() else []


def test_the_setup_runs_once_before_the_command(tmp_path: Path) -> None:
    """Setup and command share directory, environment, log and session; a second start runs neither again."""
    run = run_folder(tmp_path)
    _start(run, 'echo setup >> order; echo "in $HOME"; ps -o sid= -p $$ > setup.sid', "sh", "-c",
           "echo command >> order; ps -o sid= -p $$ > command.sid; exit 4")  # fmt: skip
    end = ended(run)
    assert (end.exit_code, end.in_setup) == (4, False)
    tasks.start(run, task_launch(run, *_COMMAND, setup=("/bin/sh", "-e", str(run.setup_script))))
    assert _order(run) == ["setup", "command"]
    assert run.output.read_text() == f"in {run.work}\n"
    assert (run.work / "setup.sid").read_text() == (run.work / "command.sid").read_text()
    assert begun_at_s(str(run.begun)) is not None


@pytest.mark.parametrize(
    ("script", "exit_code", "signum"),
    [("exit 7", 7, None), ("false; echo not reached", 1, None), ("kill -9 $$", None, 9), ("no-such-tool", 127, None)],
)
def test_a_failed_setup_is_told_apart(tmp_path: Path, script: str, exit_code: int | None, signum: int | None) -> None:
    """The task ends as its setup script did, its command never runs, and its outcome says that it was the setup."""
    run = run_folder(tmp_path)
    _start(run, script)
    end = ended(run)
    assert (end.exit_code, end.signal, end.in_setup) == (exit_code, signum, True)
    assert _order(run) == []
    (exit_,) = outcome("m", [run], None).exits
    assert (exit_.in_setup, exit_.succeeded) == (True, False)


def test_a_task_without_setup_is_as_before(tmp_path: Path) -> None:
    """Without a setup script there is no file `begun`, and no end counts as one of the setup."""
    run = run_folder(tmp_path)
    tasks.start(run, task_launch(run, *_COMMAND))
    assert (ended(run).in_setup, (run.begun).exists()) == (False, False)


def test_a_notice_reaches_the_setup(tmp_path: Path) -> None:
    """A task that is stopped during its setup ends at once, its command never runs, and no process is left."""
    run = run_folder(tmp_path)
    _start(run, "echo setup >> order; sleep 60")
    until(lambda: _order(run) == ["setup"])
    tasks.request_stop(run, 30.0, told=True)
    end = ended(run)
    assert end.signal == signal.SIGTERM and end.in_setup
    until(lambda: processes_of(tmp_path) == [])
    assert _order(run) == ["setup"]


def test_a_notice_after_the_setup_reaches_the_command_alone(tmp_path: Path) -> None:
    """After the setup the command replaces the process that waited for it, so it is the one that gets the notice."""
    run = run_folder(tmp_path)
    _start(run, "true", "sh", "-c", "trap 'echo saved >> order; exit 0' TERM; echo ready >> order; sleep 60 & wait")
    until(lambda: _order(run) == ["ready"])
    identities = run.identities()
    assert identities is not None and process_name(identities[1].pid) == "sh"
    tasks.request_stop(run, 30.0, told=True)
    assert (ended(run).exit_code, _order(run)) == (0, ["ready", "saved"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start tasks as another user")
def test_the_task_cannot_write_when_it_began(tmp_path: Path) -> None:
    """The file `begun` belongs to the agent's user: a setup that fails cannot claim that it succeeded."""
    run = run_folder(tmp_path)
    for path in (tmp_path, run.path, run.work):
        path.chmod(0o777)
    run.setup_script.write_text(f"echo 1 > {run.begun}; exit 3")
    run.setup_script.chmod(0o755)
    nobody = 65534
    tasks.start(
        run, task_launch(run, *_COMMAND, setup=("/bin/sh", "-e", str(run.setup_script)), uid=nobody, gid=nobody)
    )
    assert ended(run).in_setup


# ------------------------------------------------------------------------------------- several tasks on one machine


def _gang(tmp_path: Path, script: str, command: str, count: int = 3) -> list[RunFolder]:
    """Starts tasks of one job on one machine, those that wait first, and returns their folders."""
    runs = [run_folder(tmp_path, task=task) for task in range(count)]
    for run in runs:
        (run.work / "conf").mkdir()
        (run.work / "conf" / "lr").write_text("0.1\n")
        (run.work / "train.py").write_text("print()\n")
        run.setup_script.write_text(script)
    setup = ("/bin/sh", "-e", str(runs[0].setup_script))
    for run in runs[1:]:
        tasks.start(run, task_launch(run, "sh", "-c", command, setup=setup, setup_by=str(runs[0].begun)))
    shares = tuple(str(run.work) for run in runs[1:])
    tasks.start(runs[0], task_launch(runs[0], "sh", "-c", command, setup=setup, shares=shares))
    return runs


def test_the_tasks_of_a_machine_share_one_setup(tmp_path: Path) -> None:
    """The script runs once. The others find what it made and what it changed; what it left alone stays their own."""
    count = tmp_path / "count"
    script = f"echo x >> {count}; sleep 0.3; mkdir env; echo made > env/lib; echo 0.2 > conf/lr; echo new > conf/new"
    runs = _gang(tmp_path, script, "cat env/lib conf/lr conf/new; echo $$ > own; echo $$ > train.py; sleep 0.2")
    for run in runs:
        end = ended(run)
        assert (end.exit_code, end.in_setup) == (0, False)
        assert run.output.read_text() == "made\n0.2\nnew\n"
    assert count.read_text() == "x\n"
    assert (runs[1].work / "env").is_symlink() and not (runs[1].work / "conf").is_symlink()
    assert not (runs[1].work / "conf" / "lr").is_symlink()
    for name in ("own", "train.py"):
        assert len({(run.work / name).read_text() for run in runs}) == len(runs), f"{name} is each task's own"


def test_a_failed_setup_starts_no_command(tmp_path: Path) -> None:
    """The others wait until they are stopped; none of them has begun."""
    runs = _gang(tmp_path, "exit 5", "echo command >> order")
    assert (ended(runs[0]).exit_code, ended(runs[0]).in_setup) == (5, True)
    for run in runs[1:]:
        assert run.exit() is None
        tasks.request_stop(run, 30.0, told=False)
        end = ended(run)
        assert end.signal == signal.SIGTERM and end.in_setup and end.noticed
    assert [_order(run) for run in runs] == [[], [], []]
    first = outcome("m", runs, None).exits[0]
    assert (first.task, first.exit_code, first.in_setup) == (0, 5, True)


# ---------------------------------------------------------------------------------------------------- the whole agent


def _with_setup(lab: Lab, config: AgentConfig, setup: str, *commands: str, **job: Any) -> LaunchDescription:
    launch = description(lab.region, config, *commands)
    jobs = {"main": launch.jobs["main"].model_copy(update={"setup": setup, **job})}
    launch = launch.model_copy(update={"jobs": jobs, "files": {"conf/lr": "0.1\n"}})
    lab.write(launch)
    return launch


async def test_isolated_tasks_share_one_setup(lab: Lab) -> None:
    """In the strongest isolation, too: a program that the setup installs runs in every task, and one task restarts."""
    config = lab.config()
    tool = "printf '#!/bin/sh\\necho tool $RANK' > env/bin/tool; chmod +x env/bin/tool"
    setup = f"echo x >> made.count; mkdir -p env/bin; {tool}"
    use = "env/bin/tool; cat conf/lr made.count"
    once = f"{use}; test -e again || {{ touch again; exit 9; }}"
    launch = _with_setup(lab, config, f"{setup}; echo 0.2 > conf/lr", use, once, use, restarts={"9": 1})
    async with lab.agent(config):
        result: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert [(e.exit_code, e.in_setup) for e in result.exits] == [(0, False)] * 3 and not result.stopped
    assert {e.task: e.restarts for e in result.exits} == {0: 0, 1: 0, 2: 0}
    for task in range(3):
        lines = lab.folder_of(launch, config, task=task).output.read_text().splitlines()
        assert lines[:3] == [f"tool {task}", "0.2", "x"]
        assert len(lines) == (7 if task == 1 else 3)


async def test_a_failed_setup_fails_the_attempt(lab: Lab) -> None:
    """The agent stops the tasks that wait for it; the task that ran it is the one that failed."""
    config = lab.config()
    launch = _with_setup(lab, config, "exit 5", "echo command", "echo command")
    async with lab.agent(config):
        result: NodeOutcome = await (await lab.run(launch, config.machine)).result(NodeOutcome)
    assert [(e.task, e.exit_code, e.in_setup) for e in result.exits] == [(0, 5, True), (1, None, True)]
    assert lab.folder_of(launch, config, task=1).output.read_text() == ""
