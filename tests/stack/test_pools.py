"""A pool of spot machines on a whole stack: real agents, which the cloud starts, tells and takes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from providers.trace.cloud import Cloud
from providers.trace.settings import TraceSettings
from tests.stack.harness import Up, processes_of, wait_until

FLEET = """
version: 1
regions:
  - {name: west, clusters: []}
"""
CLOUD = {
    "zones": {
        "za": {"region": "west", "most": 2},
        "zb": {"region": "west", "most": 2, "price_factor": 3, "kind": "on_demand"},
    },
    "machine_types": {"small": {"gpus": 2, "gpu_type": "a100", "cpus": 8, "memory": "8GiB", "usd_per_h": 2}},
    "start_median_s": 1,
    "notice_s": 8,
}
SETTINGS = {
    "capacity": {"interval_s": 1, "refused_pause_s": 3, "drain_s": 60},
    "providers": {"sim": {"kind": "trace", **CLOUD}},
}


pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.fixture
def spot(tmp_path: Path) -> Iterator[Up]:
    """A stack without any machine of its own."""
    stack = Up(tmp_path, FLEET, settings=yaml.safe_dump(SETTINGS))
    yield stack
    stack.close()


def test_a_gang_runs_on_machines_that_were_launched_for_it(spot: Up, tmp_path: Path) -> None:
    """It saves when the cloud takes its machines, goes on on others, and nothing is left of any at the end."""
    spot.start(machines=False)
    client = spot.client()
    client.set_tenant("t", 3, {"a100": 8}, None)
    gate = tmp_path / "gate"
    workload = spot.submit("train", 10**6, 0.05, tasks=3, gate=gate)
    client.set_pool("west", "burst", size=2)

    def on(cluster: str) -> bool:
        row = client.workload(workload)
        return row["phase"] == "running" and all(m.startswith(f"west/{cluster}/") for m in spot.machines_of(workload))

    wait_until(lambda: on("burst-za-spot"), "the gang runs on spot machines")
    wait_until(lambda: spot.saved_step(workload), "it has saved")
    cloud = Cloud(TraceSettings.model_validate(CLOUD), spot.data / "providers" / "sim")
    for machine in cloud.there():
        cloud.take(machine.instance.native_id)
    wait_until(lambda: on("burst-zb-on-demand"), "it runs on others, after its zone was taken")
    assert client.workload(workload)["attempt"] == 2
    gone = [one for one in client.instances(gone=True) if one["phase"] == "gone" and one["ready_at"]]
    assert {one["zone"] for one in gone} <= {"za"}
    client.cancel(workload)
    client.set_pool("west", "burst", size=0)
    wait_until(lambda: not list(client.instances()), "all machines are ended")
    wait_until(lambda: client.machines() == [], "none is known any more")
    assert {one["phase"] for one in client.instances(gone=True)} == {"gone"}
    assert not list((spot.data / "machines").iterdir())
    assert spot.interrupt() == 0
    assert processes_of(spot.data) == {}
