"""A region without schedulers, as after a start with another fleet file, is shown as silent and blocks no workload."""

from pathlib import Path

import pytest

from tests.stack.harness import Up, wait_until
from tests.stack.silence import removes_silent

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

_FLEET = """
version: 1
regions:
  - name: {name}
    clusters:
      - name: a
        machines: [{{name: m, count: 1, gpus: 1, gpu_type: a100, cpus: 4, memory: 4GiB}}]
"""


@pytest.mark.long  # `test_sites.py` removes the region of a stopped site.
def test_a_region_of_an_earlier_fleet_file_is_named_and_can_be_removed(tmp_path: Path) -> None:
    """Workloads start in the new region; the old region is shown as silent until it is removed."""
    old = Up(tmp_path, _FLEET.format(name="old"))
    try:
        old.start()
        old.client().set_tenant("t", 3, {"a100": 9}, None)
        old.client().set_tenant("top", 1, {"a100": 9}, None)
        assert old.interrupt() == 0
    finally:
        old.close()
    up = Up(tmp_path, _FLEET.format(name="new"))
    up.port = old.port
    try:
        up.start()
        client, gate = up.client(), tmp_path / "gate"
        running = up.submit("first", steps=1, step_s=0.0, gate=gate)
        wait_until(lambda: up.phase(running) == "running", "the first workload runs in the new region")
        waiting = up.submit("second", steps=1, step_s=0.0, gate=gate)

        removes_silent(up, waiting, "old", "new")
        assert [region["name"] for region in client.regions()] == ["new"]
        gate.touch()
        wait_until(lambda: up.ended(running) and up.ended(waiting), "both workloads succeed")
        assert "region old has not answered within 2 s" in "".join(
            path.read_text() for path in (up.data / "run" / "log").glob("worker*.log")
        )
    finally:
        up.close()
