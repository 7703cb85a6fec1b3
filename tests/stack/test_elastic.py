"""An elastic gang on a whole stack: it starts with the slots that are there, and resumes with more and with fewer."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.fleet import power_off
from server.agents import machine_state_dir
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]
_WAIT_S = 240.0
JOB = Path(__file__).with_name("elastic_job.py")
_FLEET = f"""
version: 1
regions:
  - name: r
    clusters:
      - name: c
        machines:
          - {{name: m, count: 2, gpus: 2, gpu_type: a100, cpus: 4, memory: 4GiB, owner: "{os.getuid()}"}}
"""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Up]:
    """A stack with two machines of two GPUs each."""
    up = Up(tmp_path / "elastic", _FLEET)
    try:
        up.start(timeout_s=400)
        up.client().set_tenant("t", 3, {"a100": 4}, None)
        yield up
    finally:
        up.close()


def test_a_gang_continues_with_more_tasks_and_with_fewer(stack: Up, tmp_path: Path) -> None:
    """With room for 2 of 4 tasks, it starts with 2. Restarted when there is room for 4, it resumes with 4. When a
    machine is lost, it resumes with 2 at once. Judged by what the tasks write.
    """
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    first, second = sorted(stack.ready_machines())
    stack.client().set_machine(second, "cordon")
    run = f'PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON" "{JOB}" "{journal}" "{gate}"'
    resources = {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"}
    document = {
        "version": 1, "name": "elastic", "tenant": "t", "checkpoint": {"interval": "1s", "grace": "5s"},
        "jobs": [{"name": "train", "tasks": {"min": 2, "max": 4}, "resources": resources, "run": run}],
    }  # fmt: skip
    workload = str(stack.client().submit(document)["id"])

    def lines() -> list[list[str]]:
        return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []

    wait_until(
        lambda: len(lines()) == 2 and (stack.saved_step(workload) or 0) > 3, "two tasks run and have saved", _WAIT_S
    )
    assert sorted(lines()) == [["0", "2", "None", "False", "0", "2"], ["1", "2", "None", "False", "0", "2"]]
    assert stack.machines_of(workload) == [first]
    job = stack.client().workload(workload)["jobs"][0]
    assert (job["tasks"], job["most_tasks"], job["placed_tasks"]) == (2, 4, 2)

    stack.client().set_machine(second, "uncordon")
    stack.client().preempt(workload)
    wait_until(lambda: len(lines()) == 6, "it continues with four tasks", _WAIT_S)
    more = sorted(lines()[2:])
    assert [line[:4] for line in more] == [[str(rank), "4", "2", "True"] for rank in range(4)]
    assert {line[5] for line in more} == {"4"}
    # A task that is late loads what task 0 of its attempt has saved meanwhile.
    assert min(int(line[4]) for line in more) > 3, "all have resumed from a checkpoint"
    assert stack.client().workload(workload)["jobs"][0]["placed_tasks"] == 4

    before = stack.saved_step(workload) or 0
    wait_until(lambda: (stack.saved_step(workload) or 0) > before, "the four tasks have saved", _WAIT_S)
    power_off(machine_state_dir(stack.data, second))
    wait_until(lambda: len(lines()) == 8, "it continues with the machine that is left", _WAIT_S)
    fewer = sorted(lines()[6:])
    assert [line[:4] for line in fewer] == [[str(rank), "2", "4", "True"] for rank in range(2)]
    assert int(fewer[0][4]) > int(more[0][4])
    gate.touch()
    wait_until(lambda: stack.ended(workload), "it succeeds", _WAIT_S)
    assert [one["tasks"] for one in stack.client().attempts(workload)] == [2, 4, 2]
