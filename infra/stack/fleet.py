"""The fleet file of the embedded stack: its regions, clusters and machines, all of which run on this computer.

The file declares the number of GPUs of each machine; they are not detected.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from domain.capacity import CapacityKind
from domain.documents import DocumentPart, Name, RuleError
from domain.ids import machine_id
from domain.isolation import Isolation
from infra.documents import read_document
from infra.machine_shape import MachineShape

_UNIQUE = "Names of regions are unique, and names of machines in a cluster; count: 2 makes the names NAME-1 and NAME-2"


class MachineEntry(MachineShape):
    """One machine, or `count` machines with the names `name-1`, `name-2`, ..."""

    name: Name
    count: int | None = Field(None, ge=1, le=1000)
    rack: str = "rack-1"
    run_as: str | None = None
    """User that all tasks on the machine run as. None: a separate user for each tenant if mizzen runs as root, else
    mizzen's own user."""
    owner: str | None = None
    """User who lends the machine, and may take it back (`docs/lending.md`). None: nobody may."""


class ClusterEntry(DocumentPart):
    """A cluster of machines. Settings that are omitted keep the values of `mizzen clusters set`."""

    name: Name
    machines: tuple[MachineEntry, ...]
    zone: str | None = None
    capacity: CapacityKind | None = None
    prices: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """US dollars per hour of a GPU, by GPU type, and of a core, under the key `cpu`."""
    store_url: str | None = None
    """URL of the store in which workloads that run there save checkpoints. None: the region's bucket."""
    link_mbit: float | None = Field(None, gt=0)
    """Bandwidth of the link to the other clusters of the region, in Mbit/s."""
    isolation: Isolation | None = None
    """How tasks are separated on its machines. None: as `tasks.isolation` in the settings says."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings that are set, by column of `infra.db.models.Cluster`."""
        return self.model_dump(mode="json", exclude={"name", "machines", "isolation"}, exclude_none=True)


class RegionEntry(DocumentPart):
    """A region. If `bucket` is None, its bucket is a folder in the data folder."""

    name: Name
    bucket: str | None = None
    clusters: tuple[ClusterEntry, ...]


class Fleet(DocumentPart):
    """The content of the fleet file: all regions."""

    rules: ClassVar[tuple[str, ...]] = (_UNIQUE,)

    version: int = Field(1, ge=1, le=1)
    regions: tuple[RegionEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> "Fleet":
        names = [region.name for region in self.regions]
        ids = [machine["id"] for machine in self.machines()]
        for what in (names, ids):
            twice = sorted(name for name, times in Counter(what).items() if times > 1)
            if twice:
                raise RuleError(_UNIQUE, f"names must be unique; named twice: {', '.join(twice)}")
        return self

    def machines(self) -> list[dict[str, Any]]:
        """Returns id, region, cluster, isolation and entry of every machine."""
        out = []
        for region in self.regions:
            for cluster in region.clusters:
                for entry in cluster.machines:
                    many = entry.count is not None
                    for number in range(1, (entry.count or 1) + 1):
                        name = f"{entry.name}-{number}" if many else entry.name
                        out.append(
                            {
                                "id": machine_id(region.name, cluster.name, name),
                                "region": region.name,
                                "cluster": cluster.name,
                                "isolation": cluster.isolation,
                                "entry": entry,
                            }
                        )
        return out

    def clusters(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Returns the settings of each cluster that has any, by region and cluster name."""
        found = {(r.name, cluster.name): cluster.settings() for r in self.regions for cluster in r.clusters}
        return {name: settings for name, settings in found.items() if settings}

    def bucket_url(self, region: RegionEntry, data_dir: Path) -> str:
        """Returns the URL of a region's bucket."""
        return region.bucket or (data_dir / "buckets" / region.name).resolve().as_uri()


DEFAULT_FLEET = Fleet(
    regions=(
        RegionEntry(
            name="local",
            clusters=(
                ClusterEntry(
                    name="main",
                    machines=(MachineEntry(name="node", count=2, gpus=4, gpu_type="gpu", cpus=8, memory=16 << 30),),
                ),
            ),
        ),
    )
)


def load_fleet(path: Path | None) -> Fleet:
    """Returns the fleet in a YAML file, or a small default fleet if `path` is None.

    Raises:
        ConfigurationError: the file cannot be read or is invalid. The message lists all problems.
    """
    if path is None:
        return DEFAULT_FLEET
    return read_document(Fleet, path, "fleet file")
