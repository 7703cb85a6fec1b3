"""Bursting into clouds, end to end: `python -m rigs.demos.bursting` runs it as a demo, `test_bursting.py` as a test.

`mizzen up` runs with three regions: `home` with two static machines, `spot` on a simulated cloud, and `cloud` on EC2
behind moto. Three gangs of two machines each are submitted. The pools grow, the spot machines are reclaimed with
notice, their gang moves, all gangs end, the pools shrink, and no machine is left.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from capacity.providers.trace.cloud import Cloud
from capacity.providers.trace.settings import TraceProviderSettings
from infra.stack.sockets import short_path
from tests.capacity.ec2 import Ec2, ec2
from tests.capacity.moto_host import MotoHost
from tests.stack.harness import Up, processes_of, wait_until

FLEET = """
version: 1
regions:
  - name: home
    clusters:
      - {name: a, machines: [{name: m, count: 2, gpus: 1, gpu_type: a100, cpus: 4, memory: 4GiB}], prices: {a100: 0.5}}
  - {name: spot, clusters: []}
  - {name: cloud, clusters: []}
"""
SHAPE = {"gpus": 1, "gpu_type": "a100", "cpus": 4, "memory": "4GiB"}
SPOT: dict[str, Any] = {
    "zones": {
        "za": {"region": "spot", "most": 2},
        "zb": {"region": "spot", "most": 2, "price_factor": 2, "kind": "on_demand"},
    },
    "machine_types": {"small": {**SHAPE, "usd_per_h": 1}},
    "start_median_s": 1,
    "notice_s": 10,
}


def settings(region: Ec2, temporal: str, agents: Path) -> str:
    """Returns the installation's settings as YAML; `agents` is the settings file of agents on EC2."""
    aws = {
        "kind": "ec2",
        "region": "cloud",
        "aws_region": "us-east-1",
        "endpoint": region.url,
        "zones": {"us-east-1a": {}},
        "machine_types": {"p4d.24xlarge": {**SHAPE, "usd_per_h": 4}},
        "kinds": ["on_demand"],
        "image": "ami-03cf127a",
        "agent": f'mizzen agent --config {agents} --temporal {temporal} --ports "$PORTS"',
        "start_s": 5,
    }
    body = {
        "capacity": {"interval_s": 1, "refused_pause_s": 3, "drain_s": 60},
        "providers": {"sim": {"kind": "trace", **SPOT}, "aws": aws},
    }
    return yaml.safe_dump(body)


@contextlib.contextmanager
def installation(folder: Path) -> Iterator[tuple[Up, Ec2]]:
    """Yields the stack, not started yet, and the simulated EC2 region, whose instances run as local processes."""
    with ec2() as region:
        up = Up(folder, FLEET)
        config = folder / "config.yaml"
        temporal = f"unix:{short_path(up.data / 'run') / 'temporal.sock'}"
        # As in the stack's own settings: tasks must be able to read the gate file in the folder of the test.
        (folder / "agents.yaml").write_text("tasks: {isolation: none}\n")
        config.write_text(config.read_text() + settings(region, temporal, folder / "agents.yaml"))
        host = MotoHost(region, folder / "ec2")
        host.start()
        try:
            yield up, region
        finally:
            up.close()
            host.close()


class Bursting:
    """The demo; each step prints what happened."""

    def __init__(self, up: Up, region: Ec2, say: Callable[[str], None]) -> None:
        self.up, self.region, self.say = up, region, say
        self.cloud: Cloud | None = None

    def whereabouts(self, workload: str) -> str | None:
        """Returns the region of a running workload, or None if the workload is not in phase `running`."""
        row = self.up.client().workload(workload)
        return str(row["region"]) if row["phase"] == "running" else None

    def _all_run(self, gangs: list[str]) -> bool:
        return all(self.whereabouts(gang) for gang in gangs)

    def tell(self) -> None:
        """Runs all steps.

        Raises:
            AssertionError: a step did not have its result in time.
        """
        up, client = self.up, self.up.client()
        client.set_tenant("t", 3, {"a100": 6}, None)
        gate = up.folder / "gate"
        for region in ("spot", "cloud"):
            client.set_pool(region, "burst", max_size=2, idle_s=4)
        gangs = [up.submit(f"gang-{n}", 40, 0.1, tasks=2, gate=gate) for n in range(3)]
        self.say("three gangs of two machines each are submitted; home has two machines")
        wait_until(lambda: self.said(gangs), "`why` reports that machines are launched")
        wait_until(lambda: self._all_run(gangs), "all gangs run")
        where = {gang: self.whereabouts(gang) for gang in gangs}
        self.say(f"all gangs run, in the regions {', '.join(sorted(map(str, where.values())))}")
        assert sorted(map(str, where.values())) == ["cloud", "home", "spot"]
        (moved,) = (gang for gang, region in where.items() if region == "spot")
        wait_until(lambda: up.saved_step(moved), "the gang on spot machines has saved a checkpoint")
        cloud = Cloud(TraceProviderSettings.model_validate(SPOT), up.data / "providers" / "sim")
        taken = [machine for machine in cloud.there() if machine.instance.zone == "za"]
        for machine in taken:
            cloud.take(machine.instance.native_id)
        self.say(f"the provider preempts {len(taken)} spot machines, with notice")
        wait_until(lambda: client.workload(moved)["attempt"] == 2 and self.whereabouts(moved), "attempt 2 runs")
        self.say(f"the gang has saved and runs again on {', '.join(sorted(up.machines_of(moved)))}")
        wait_until(lambda: self.resumed(moved) > 0, "the second attempt has resumed from a checkpoint")
        gate.touch()
        wait_until(lambda: all(up.ended(gang) for gang in gangs), "all gangs end")
        self.say("all gangs have ended")
        wait_until(lambda: not list(client.instances()), "the pools have shrunk")
        assert self.region.live() == []
        assert cloud.there() == []
        wait_until(lambda: [m["region"] for m in client.machines()] == ["home", "home"], "no pool machine is left")
        launched = [one for one in client.instances(gone=True) if one["launched_at"]]
        for one in launched:
            ended = one["reason"]["code"] if one["reason"] else ""
            self.say(f"  {one['id']} {one['zone']:<11} {one['kind']:<9} ${one['usd']:.4f} {ended}")
        self.say(f"the pools are empty; {len(launched)} machines cost ${sum(one['usd'] for one in launched):.4f}")
        costs = client.costs()
        for cost in costs:
            self.say(f"  {cost['tenant']} {cost['capacity']:<9} {cost['resource']:<5} {cost['hours']:.4f} h")
        assert {cost["capacity"] for cost in costs if cost["usd"] > 0} == {"reserved", "spot", "on_demand"}

    def resumed(self, workload: str) -> int:
        """Returns the step from which the newest attempt resumed, as printed by its task."""
        (said,) = (line for line in self.up.client().logs(workload, task=0) if line.startswith(b"starting at step"))
        return int(said.split()[3])

    def said(self, gangs: list[str]) -> bool:
        """Returns whether `mizzen why` reports for one of the gangs that machines are being launched."""
        for gang in gangs:
            for reason in self.up.client().why(gang)["reasons"]:
                if reason["code"] == "waiting_for_capacity":
                    self.say(f"why: {reason['sentence']}")
                    return True
        return False


def main() -> None:
    """Runs the demo on the terminal."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", flush=True)

    with tempfile.TemporaryDirectory() as folder, installation(Path(folder)) as (up, region):
        say("starting mizzen with three regions: static machines, spot machines and EC2")
        up.start()
        Bursting(up, region, say).tell()
        code = up.interrupt()
        left = processes_of(up.data)
        say(f"stopped with exit code {code}; {len(left)} processes are left")
        sys.exit(code or len(left))


if __name__ == "__main__":
    main()
