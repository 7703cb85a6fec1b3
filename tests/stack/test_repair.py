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
@pytest.mark.parametrize("quota", [0, 8])
def test_the_other_task_stays_on_its_machine(tmp_path: Path, quota: int) -> None:
    """A gang of two machines loses one, and resumes on its other machine and a third one, before an older workload that
    waits for four. The third one is a spare or, if all are in use, it evicts over-quota work there.
    """
    up, journal = Up(tmp_path / "stack", _FLEET), tmp_path / "journal"
    config = up.folder / "config.yaml"
    config.write_text(config.read_text().replace("min_runtime_s: 1,", "min_runtime_s: 1, repair: true,"))
    run = f'echo "$PWD" >> "{journal}"; PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON"'
    run += f' "{ROOT / "tests" / "stack" / "job.py"}" 1000000 0.1'

    def submit(name: str, tasks: int, command: str, tenant: str = "poor") -> str:
        resources = {"accelerators": "a100:2", "cpus": 0.1, "memory": "64MiB"}
        document: dict[str, Any] = {
            "version": 1, "name": name, "tenant": tenant, "checkpoint": {"interval": "1s", "grace": "5s"},
            "jobs": [{"name": "main", "tasks": tasks, "resources": resources, "run": command}],
        }  # fmt: skip
        return str(up.client().submit(document)["id"])

    try:
        up.start()
        up.client().set_tenant("poor", 5, {"a100": 0}, None)
        up.client().set_tenant("t", 5, {"a100": quota}, None)
        fillers = [submit("filler", 1, "sleep 10000") for _ in range(3)]
        wait_until(lambda: all(up.phase(one) == "running" for one in fillers), "three machines are taken")
        older = submit("older", 4, "true", "t" if quota == 0 else "poor")
        gang = submit("gang", 2, run, "t")
        wait_until(lambda: (up.saved_step(gang) or 0) > 0, "the gang has saved")
        before = _machines(up, journal)
        assert len(before) == len(set(before)) == 2
        if quota == 0:
            for one in fillers:
                up.client().cancel(one)
            wait_until(lambda: all(up.phase(one) == "cancelled" for one in fillers), "three machines are free")
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
        assert len(placed[-1]["detail"]["victims"]) == (quota > 0)
        assert sum(up.phase(one) == "running" for one in fillers) == (2 if quota else 0)
        assert up.phase(older) in ("pending", "preempted")
    finally:
        up.close()


def _machines(up: Up, journal: Path) -> list[str]:
    """Returns the machine of each start of a task, in the order of the starts."""
    folders = {f"{machine_state_dir(up.data, one['id'])}/": str(one["id"]) for one in up.client().machines()}
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [name for line in lines for folder, name in folders.items() if line.startswith(folder)]
