"""An installation whose machines are pilot jobs of a Slurm cluster, all on this computer."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.clusters.site import ClusterSite
from tests.slurm.bench import settings_for
from tests.slurm.cluster import SlurmCluster, cluster


class SlurmSite(ClusterSite):
    """See `ClusterSite`."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, fleet: str | None = None, lost_after_s: float = 600, **provider: Any
    ) -> None:
        """`provider`: changed settings of the provider `site`."""
        super().__init__(folder, "hpc", "pilots", fleet, lost_after_s)
        self.slurm = slurm
        self.add_provider("slurm", settings_for(slurm, region="hpc", agent=self.agent, kill_wait_s=5, **provider))

    def start(self) -> None:
        """See `ClusterSite.start`. The workers find Slurm's commands."""
        self.up.environment = {"PATH": self.slurm.environ["PATH"]}
        super().start()

    def machines(self) -> list[str]:
        """See `ClusterSite.machines`."""
        return [f"{job}.{name}" for name, jobs in self.slurm.jobs().items() for job in jobs]

    def ever(self) -> Counter[str]:
        """See `ClusterSite.ever`. Slurm must keep ended jobs for the whole test."""
        listed = self.slurm.command("squeue", "-h", "-t", "all", "-o", "%j").splitlines()
        return Counter(name for name in listed if name.startswith("in-"))

    def secrets(self) -> list[str]:
        """See `ClusterSite.secrets`."""
        return [file.name for file in (self.slurm.folder / "pilots").glob("*.env")]

    def states(self) -> Iterator[Path]:
        """See `ClusterSite.states`."""
        return self.slurm.folder.glob("mizzen-*")


@contextlib.contextmanager
def site(folder: Path, nodes: int = 2, **provider: Any) -> Iterator[SlurmSite]:
    """Yields a site whose cluster runs."""
    with cluster(nodes) as slurm:
        made = SlurmSite(slurm, folder, **provider)
        try:
            yield made
        finally:
            made.close()
