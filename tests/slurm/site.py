"""An installation whose machines are pilot jobs of a Slurm cluster, all on this computer."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from agent.fleet import power_off
from tests.slurm.bench import settings_for
from tests.slurm.cluster import SlurmCluster, cluster
from tests.stack.harness import Up, wait_until

FLEET = "{version: 1, regions: [{name: hpc, clusters: []}]}"
CAPACITY = {"interval_s": 1, "refused_pause_s": 3, "drain_s": 60, "no_work_s": 20, "leave_s": 10}


class SlurmSite:
    """A stack, not started yet, and a cluster that runs."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, fleet: str = FLEET, lost_after_s: float = 600, **provider: Any
    ) -> None:
        """`provider`: changed settings of the provider `site`."""
        self.slurm = slurm
        capacity = yaml.safe_dump({"capacity": {**CAPACITY, "lost_after_s": lost_after_s}})
        self.up = Up(folder, fleet, settings=capacity)
        mizzen = Path(sys.executable).parent / "mizzen"
        agent = f"{mizzen} agent --config {self.up.data}/run/agents.yaml"
        body = settings_for(slurm, region="hpc", agent=agent, kill_wait_s=5, **provider)
        config = folder / "config.yaml"
        config.write_text(config.read_text() + yaml.safe_dump({"providers": {"site": {"kind": "slurm", **body}}}))

    def start(self) -> None:
        """Starts the stack, with a tenant."""
        self.up.environment = {"PATH": self.slurm.environ["PATH"]}
        self.up.start(timeout_s=240)
        self.up.client().set_tenant("t", 3, {"a100": 16}, None)

    def pool(self, **rules: Any) -> None:
        """Sets the rules of the pool `pilots`."""
        self.up.client().set_pool("hpc", "pilots", **rules)

    def instances(self, *, gone: bool = False) -> list[dict[str, Any]]:
        """Returns the instances, the newest first."""
        return list(self.up.client().instances(gone=gone))

    def until_ready(self, count: int) -> list[dict[str, Any]]:
        """Waits until this many instances are ready; returns them."""
        wait_until(lambda: len(self._ready()) >= count, f"{count} pilots are ready")
        return self._ready()

    def _ready(self) -> list[dict[str, Any]]:
        return [one for one in self.instances() if one["phase"] == "ready"]

    def close(self) -> None:
        """Ends the stack, and what tasks of pilots left."""
        self.up.close()
        for folder in self.slurm.folder.glob("mizzen-*"):
            power_off(folder)


@contextlib.contextmanager
def site(folder: Path, nodes: int = 2, **provider: Any) -> Iterator[SlurmSite]:
    """Yields a site whose cluster runs."""
    with cluster(nodes) as slurm:
        made = SlurmSite(slurm, folder, **provider)
        try:
            yield made
        finally:
            made.close()
