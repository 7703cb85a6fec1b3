"""Platform notices and unloadable checkpoints on a whole stack."""

from pathlib import Path
from typing import Any

import pytest

from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
SDK = ROOT / "sdk"


def submitted(up: Up, name: str, run: str) -> str:
    """Submits a workload of one task for the tenant `t`, and returns its id."""
    document = {
        "version": 1,
        "name": name,
        "tenant": "t",
        "checkpoint": {"grace": "60s"},
        "jobs": [
            {
                "name": "job",
                "tasks": 1,
                "resources": {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"},
                "run": run,
            }
        ],
    }
    return str(up.client().submit(document)["id"])


def test_a_workload_is_placed_anew_while_its_task_saves(shared: Up, tmp_path: Path) -> None:
    """The next attempt is awarded before the old one has saved, and resumes from the old one's last save."""
    gate = tmp_path / "gate"
    job = Path(__file__).with_name("notice_job.py")
    run = f'test -z "${{MIZZEN_CHECKPOINT_INTERVAL_S-}}"; PYTHONPATH="{SDK}" exec "$MIZZEN_PYTHON" "{job}" "{gate}"'
    workload = submitted(shared, "leaving", run)

    def attempts() -> list[Any]:
        return list(shared.client().attempts(workload))

    wait_until(lambda: len(attempts()) == 2, "the next attempt is awarded before the first one saves")
    first, second = attempts()
    assert (first["outcome"]["code"], second["started_at"]) == ("platform_notice", None)
    assert first["outcome"]["detail"]["words"] == "preempted is TRUE"
    gate.touch()
    wait_until(lambda: shared.ended(workload), "the workload resumes and succeeds")
    first, second = attempts()
    assert (first["checkpoint_step"], second["resumed_step"]) == (7, 7)
    assert second["awarded_at"] < first["checkpoint_at"] < second["started_at"]
    assert first["notice"]["decision"] == "Save now."
    view = shared.client().workload(workload)
    assert (view["preemptions"], view["phase"], view["lost_s"]) == (1, "succeeded", 0.0)
    assert view["progress"]["cadence"]["interval_s"] == 805.0
    wait_until(
        lambda: len(shared.ready_machines()) == shared.machines, "the machine of the first attempt is ready again"
    )


def test_checkpoints_that_do_not_load_twice_stop_a_workload(shared: Up) -> None:
    """If two attempts in a row cannot load a checkpoint, the workload fails; its reason quotes the error."""
    run = (
        f'PYTHONPATH="{SDK}" exec "$MIZZEN_PYTHON" -c "'
        "from mizzen import report; report.loading(); report.load_failed(ValueError('part model: bad checksum'), 2);"
        ' raise SystemExit(1)"'
    )
    workload = submitted(shared, "unloadable", run)
    wait_until(lambda: shared.phase(workload) == "failed", "the workload fails")
    reason = shared.client().workload(workload)["reason"]
    assert reason is not None and reason["code"] == "checkpoint_unloadable"
    assert reason["detail"]["failures"] == 2
    assert reason["sentence"].endswith("ValueError: part model: bad checksum")
    assert len(shared.client().attempts(workload)) == 2
