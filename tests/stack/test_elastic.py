"""Gangs that change on a whole stack: one leaves its machine to another, one resumes with more and with fewer tasks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agent.fleet import power_off
from infra.config.settings import load_settings
from infra.db.session import open_engine
from server.agents import machine_state_dir
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.rotating, pytest.mark.stack, pytest.mark.timeout(900)]
_WAIT_S = 240.0
JOB = Path(__file__).with_name("elastic_job.py")
_FLEET = f"""
version: 1
regions:
  - name: r
    clusters:
      - name: c
        machines:
          - {{name: m, count: 2, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB, owner: "{os.getuid()}"}}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack with two machines of four GPUs each, in which each workload may move once in an hour."""
    up = Up(tmp_path_factory.mktemp("gangs"), _FLEET)
    config = up.folder / "config.yaml"
    config.write_text(config.read_text().replace("min_runtime_s: 1,", "min_runtime_s: 1, moves_per_h: 1,"))
    try:
        up.start(timeout_s=400)
        yield up
    finally:
        up.close()


def _backdate(up: Up, workloads: list[str]) -> None:
    """Makes running workloads old enough to be moved, without waiting for half an hour."""
    engine = open_engine(load_settings(up.data / "run" / "settings.yaml").database)
    with engine.begin() as connection:
        connection.execute(
            text("update attempt set started_at = now() - interval '1 hour' where workload = any(:w)"), {"w": workloads}
        )
    engine.dispose()


def test_a_moved_workload_continues_from_its_checkpoint(stack: Up, tmp_path: Path) -> None:
    """Two workloads run on two machines. One moves to the machine of the other, so that a gang of four GPUs fits. The
    moved workload saves at its notice, resumes at the saved step, and does not return to the queue.
    """
    up, gate = stack, tmp_path / "gate"
    up.client().set_tenant("t", 5, {"a100": 0}, None)
    fillers = [up.submit(f"filler{k}", 1_000_000, 0.2, tasks=3) for k in range(2)]
    wait_until(lambda: all(up.phase(w) == "running" for w in fillers), "the machines are nearly full")
    pair = [up.submit(name, 10_000, 0.1, gate=gate) for name in ("first", "second")]
    wait_until(lambda: all((up.saved_step(w) or 0) > 0 for w in pair), "both have saved")
    assert up.machines_of(pair[0]) != up.machines_of(pair[1])
    for filler in fillers:
        up.client().cancel(filler)
    wait_until(lambda: all(up.phase(w) == "cancelled" for w in fillers), "the machines have room")
    _backdate(up, pair)
    resources = {"accelerators": "a100:4", "cpus": 1, "memory": "64MiB"}
    jobs = [{"name": "big", "resources": resources, "run": "true"}]
    gang: dict[str, Any] = {"version": 1, "name": "gang", "tenant": "t", "jobs": jobs}
    big = str(up.client().submit(gang)["id"])
    wait_until(lambda: up.phase(big) == "succeeded", "the gang has run", 180.0)
    (moved,) = [w for w in pair if len(up.client().attempts(w)) == 2]
    (stays,) = [w for w in pair if w != moved]
    wait_until(lambda: up.phase(moved) == "running", "the workload runs again")
    assert up.machines_of(moved) == up.machines_of(stays)
    first, second = up.client().attempts(moved)
    assert first["outcome"]["code"] == "moved" and first["lost_s"] == 0.0
    wait_until(lambda: up.client().attempts(moved)[1]["resumed_step"] is not None, "it has loaded its checkpoint")
    second = up.client().attempts(moved)[1]
    assert second["resumed_step"] == first["checkpoint_step"] == first["last_step"]
    assert up.client().workload(moved)["preemptions"] == 0
    assert [len(up.client().attempts(stays)), len(up.client().attempts(big))] == [1, 1]
    kinds = [event["kind"] for event in up.client().events(moved)]
    left = kinds.index("workload.preempted")
    assert kinds[left + 1] == "workload.placing" and kinds.count("workload.pending") == 1
    for workload in pair:
        up.client().cancel(workload)
    wait_until(lambda: all(up.phase(w) == "cancelled" for w in pair), "the machines are free")


def test_a_gang_continues_with_more_tasks_and_with_fewer(stack: Up, tmp_path: Path) -> None:
    """With room for 2 of 4 tasks, it starts with 2. Restarted when there is room for 4, it resumes with 4. When a
    machine is lost, it resumes with 2 at once. Judged by what the tasks write.
    """
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    stack.client().set_tenant("t", 3, {"a100": 8}, None)
    first, second = sorted(stack.ready_machines())
    stack.client().set_machine(second, "cordon")
    run = f'PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON" "{JOB}" "{journal}" "{gate}"'
    resources = {"accelerators": "a100:2", "cpus": 0.1, "memory": "64MiB"}
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
    assert len({line[4] for line in more}) == 1 and int(more[0][4]) > 3, "all have resumed from one checkpoint"
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
