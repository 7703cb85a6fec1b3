"""Checkpoints in the memory of machines, on a whole stack: a lost machine, the peer's memory, the end of a workload."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.fleet import power_off
from domain.ids import checkpoint_prefix
from server.agents import machine_state_dir
from tests.agent.test_memory_servers import TRAINING
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(500)]
_FLEET = """
version: 1
regions:
  - name: r
    clusters:
      - name: c
        machines:
          - {name: a, rack: one, cpus: 4, memory: 1GiB}
          - {name: b, rack: two, cpus: 4, memory: 1GiB}
          - {name: c, rack: three, cpus: 4, memory: 1GiB}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack of three machines, each with 256 MiB for checkpoints."""
    up = Up(tmp_path_factory.mktemp("memory"), _FLEET, settings="")
    config = up.folder / "config.yaml"
    config.write_text(config.read_text().replace("isolation: none", "isolation: none, checkpoint_memory: 0.25"))
    try:
        up.start(timeout_s=240)
        up.client().set_tenant("t", 3, {}, None)
        yield up
    finally:
        up.close()


def _servers(up: Up) -> dict[str, dict[str, Any]]:
    """Returns the records of the memory servers of all machines, by the name of the machine."""
    found = (up.data / "machines").glob("*/memory/*/server.json")
    return {path.parents[2].name.rpartition(".")[2]: json.loads(path.read_text()) for path in found}


@pytest.mark.long
def test_a_lost_machine_continues_from_the_memory_of_its_peer(stack: Up, tmp_path: Path) -> None:
    """The machine that trains is powered off. The next attempt loads the newest step, although the bucket has lost all
    parts. Tasks do not get the memory, and a cancelled workload leaves no server.
    """
    assert {row["memory_bytes"] for row in stack.client().machines()} == {768 << 20}
    script, hold = tmp_path / "training.py", tmp_path / "hold"
    script.write_text(TRAINING)
    hold.touch()
    python = f'PYTHONPATH="{ROOT / "sdk"}" "$MIZZEN_PYTHON" -W always {script}'
    run = f"""
    if test "$RANK" = 0; then
        until test -e {tmp_path}/peer; do sleep 0.1; done
        {python} $((5 + MIZZEN_ATTEMPT)) "" 1000000 {hold}
    fi
    {python} 0 "" 1 {hold}
    touch {tmp_path}/peer
    sleep 1000
    """
    job = {"name": "main", "tasks": 2, "resources": {"cpus": 3, "memory": "600MiB"}, "run": run}
    document = {"version": 1, "name": "held", "tenant": "t", "checkpoint": {"grace": "1s"}, "jobs": [job]}
    workload = str(stack.client().submit(document)["id"])

    def said(attempt: int) -> str:
        return b"\n".join(stack.client().logs(workload, attempt=attempt, task=0)).decode()

    wait_until(lambda: "saved 6" in said(1), "the training has saved", 180)
    held = _servers(stack)
    assert len(held) == 2
    assert all(record["limit_bytes"] == int((256 << 20) * 600 / 768) for record in held.values())
    peer = said(1).partition("begins 0 0 ")[2].split()[0]
    [trains] = set(stack.machines_of(workload)) - {peer}
    power_off(machine_state_dir(stack.data, trains))
    [root] = stack.data.glob(f"**/{checkpoint_prefix(workload)}parts")
    shutil.rmtree(root)
    wait_until(lambda: "saved 7" in said(2), "the next attempt has saved", 240)
    assert "begins 6 1000000" in said(2), said(2)
    assert peer.rpartition("/")[2] in _servers(stack)
    stack.client().cancel(workload)
    wait_until(lambda: stack.phase(workload) == "cancelled", "the workload is cancelled")
    last = [machine_state_dir(stack.data, machine) / "memory" / workload for machine in stack.machines_of(workload)]
    wait_until(lambda: not any(folder.exists() for folder in last), "its servers have ended")
