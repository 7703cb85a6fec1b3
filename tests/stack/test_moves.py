"""A move on a whole stack: a gang gets the machine that a workload leaves, and the workload loses nothing."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from infra.config.settings import load_settings
from infra.db.session import open_engine
from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
_FLEET = """
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{name: m, count: 2, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB}]
"""


def _backdate(up: Up, workloads: list[str]) -> None:
    """Makes running workloads old enough to be moved, without waiting for half an hour."""
    engine = open_engine(load_settings(up.data / "run" / "settings.yaml").database)
    with engine.begin() as connection:
        connection.execute(
            text("update attempt set started_at = now() - interval '1 hour' where workload = any(:w)"), {"w": workloads}
        )
    engine.dispose()


def test_a_moved_workload_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """Two workloads use a GPU each of two machines. For a gang of four GPUs, one moves beside the other: it saves when
    it is told to stop, resumes at that step, and is not queued in between.
    """
    up, gate = Up(tmp_path / "stack", _FLEET), tmp_path / "gate"
    config = up.folder / "config.yaml"
    config.write_text(config.read_text().replace("min_runtime_s: 1,", "min_runtime_s: 1, moves_per_h: 1,"))
    try:
        up.start()
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
    finally:
        up.close()
