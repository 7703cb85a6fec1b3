"""A machine is lost on a whole stack: the gang's other task stays on its machine, judged by what the tasks write."""

from pathlib import Path
from typing import Any

import pytest

from agent.fleet import power_off
from server.agents import machine_state_dir
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
_FLEET = """
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{name: m, count: 5, gpus: 2, gpu_type: a100, cpus: 16, memory: 16GiB}]
"""


@pytest.mark.rotating
def test_the_other_task_stays_on_its_machine(tmp_path: Path) -> None:
    """An older gang waits for four machines, and gets them if a gang of two machines returns to the queue after a loss.
    With repair in place, the damaged gang resumes on its other machine and a spare, and the older gang still waits.
    """
    up, journal = Up(tmp_path / "stack", _FLEET), tmp_path / "journal"
    config = up.folder / "config.yaml"
    config.write_text(config.read_text().replace("min_runtime_s: 1,", "min_runtime_s: 1, repair: true,"))
    run = f'echo "$PWD" >> "{journal}"; PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON"'
    run += f' "{ROOT / "tests" / "stack" / "job.py"}" 1000000 0.1'

    def submit(name: str, tasks: int, command: str) -> str:
        resources = {"accelerators": "a100:2", "cpus": 0.1, "memory": "64MiB"}
        document: dict[str, Any] = {
            "version": 1, "name": name, "tenant": "t", "checkpoint": {"interval": "1s", "grace": "5s"},
            "jobs": [{"name": "main", "tasks": tasks, "resources": resources, "run": command}],
        }  # fmt: skip
        return str(up.client().submit(document)["id"])

    try:
        up.start()
        up.client().set_tenant("t", 5, {"a100": 0}, None)
        filler = submit("filler", 2, "sleep 10000")
        wait_until(lambda: up.phase(filler) == "running", "two machines are taken")
        older = submit("older", 4, "true")
        gang = submit("gang", 2, run)
        wait_until(lambda: (up.saved_step(gang) or 0) > 0, "the gang has saved")
        before = _machines(up, journal)
        assert len(before) == len(set(before)) == 2
        up.client().cancel(filler)
        wait_until(lambda: up.phase(filler) == "cancelled", "three machines are free")
        lost, kept = sorted(before)
        power_off(machine_state_dir(up.data, lost))
        wait_until(lambda: len(_machines(up, journal)) == 4, "the gang has started again", 180)
        after = set(_machines(up, journal)[2:])
        assert kept in after and lost not in after and len(after) == 2
        wait_until(lambda: up.client().attempts(gang)[1]["resumed_step"] is not None, "it has loaded its checkpoint")
        first, second = up.client().attempts(gang)
        assert first["outcome"]["code"] == "machine_lost" and second["resumed_step"] >= 1
        placed = [e for e in up.client().events(gang) if e["kind"] == "workload.placing"]
        assert placed[-1]["detail"]["kept"] == [kept] and len(placed) == 2
        assert up.phase(older) == "pending"
    finally:
        up.close()


def _machines(up: Up, journal: Path) -> list[str]:
    """Returns the machine of each start of a task, in the order of the starts."""
    folders = {f"{machine_state_dir(up.data, one['id'])}/": str(one["id"]) for one in up.client().machines()}
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [name for line in lines for folder, name in folders.items() if line.startswith(folder)]
