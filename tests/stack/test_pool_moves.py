"""Machines that move between pools on a whole stack: work that the new pool does not serve saves, and waits."""

from pathlib import Path

import pytest

from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
FLEET = """
version: 1
regions:
  - name: east
    clusters: [{name: a, machines: [{name: m, count: 2, gpus: 2, gpu_type: a100, cpus: 4, memory: 4GiB}]}]
"""
CAPACITY = "capacity: {plan_interval_s: 1, moving_share: 1.0, pool_patience_s: 1}\n"


@pytest.mark.long
def test_work_leaves_a_machine_that_moves(tmp_path: Path) -> None:
    """A gang saves when its machine moves into a pool of others, says why it waits, and resumes when it may."""
    up = Up(tmp_path / "up", FLEET, settings=CAPACITY)
    try:
        up.start()
        client, gate = up.client(), tmp_path / "gate"
        client.set_tenant("t", 3, {"a100": 4}, None)
        client.set_tenant("u", 3, {"a100": 4}, None)
        gang = up.submit("gang", 50, 0.1, tasks=4, gate=gate)
        wait_until(lambda: up.saved_step(gang), "it has saved")
        client.set_pool("east", "own", tenants=["u"], gpus={"a100": 2}, survives_loss=False)
        wait_until(lambda: [one["pool"] for one in client.machines()].count("own") == 1, "a machine has moved")
        wait_until(lambda: up.phase(gang) == "preempted", "the gang has left")
        wait_until(lambda: "in_other_pools" in {one["code"] for one in client.why(gang)["reasons"]}, "it says why")
        (moved,) = [one["id"] for one in client.machines() if one["pool"] == "own"]
        other = client.submit(
            {
                "version": 1, "name": "other", "tenant": "u",
                "jobs": [{"name": "say", "resources": {"accelerators": "a100:2", "cpus": 1}, "run": "sleep 1"}],
            }
        )["id"]  # fmt: skip
        wait_until(lambda: up.ended(other), "a workload of the pool's tenant has run")
        assert up.machines_of(other) == [moved]
        client.set_pool("east", "own", gpus={"a100": 0})
        gate.touch()
        wait_until(lambda: up.ended(gang), "the gang has resumed and succeeded")
        first, second, *_ = client.attempts(gang)
        assert second["resumed_step"] == first["checkpoint_step"] > 0
    finally:
        up.close()
