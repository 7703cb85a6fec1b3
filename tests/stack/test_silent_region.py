"""A region without schedulers, as after a start with another fleet file, is shown as silent and blocks no workload."""

import urllib.request
from pathlib import Path

import pytest

from mizzen.client.errors import Conflict
from tests.stack.harness import Up, wait_until

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
    up.ports = old.ports
    try:
        up.start()
        client, gate = up.client(), tmp_path / "gate"
        running = up.submit("first", steps=1, step_s=0.0, gate=gate)
        wait_until(lambda: up.phase(running) == "running", "the first workload runs in the new region")
        waiting = up.submit("second", steps=1, step_s=0.0, gate=gate)

        def codes() -> dict[str, str]:
            return {r["detail"].get("region"): r["code"] for r in client.why(waiting)["reasons"]}

        wait_until(lambda: codes() == {"old": "region_silent", "new": "insufficient_capacity"}, "`why` reports these")
        states = {region["name"]: region["state"] for region in client.regions()}
        assert states == {"new": "answering", "old": "silent"}
        with urllib.request.urlopen(f"http://127.0.0.1:{up.ports['port']}/metrics") as answer:
            (line,) = [t for t in answer.read().decode().splitlines() if 'region="old",state="silent"' in t]
        assert line.startswith("mizzen_region_silent_seconds{") and float(line.split()[-1]) > 0

        with pytest.raises(Conflict, match="machines: old/a/m-1"):
            client.remove_region("old")
        client.set_machine("old/a/m-1", "drain")
        client.remove_machine("old/a/m-1")
        client.remove_region("old")
        wait_until(lambda: codes() == {"new": "insufficient_capacity"}, "`why` no longer reports the old region")
        assert [region["name"] for region in client.regions()] == ["new"]
        gate.touch()
        wait_until(lambda: up.ended(running) and up.ended(waiting), "both workloads succeed")
        assert "region old has not answered within 2 s" in "".join(
            path.read_text() for path in (up.data / "run" / "log").glob("worker*.log")
        )
    finally:
        up.close()
