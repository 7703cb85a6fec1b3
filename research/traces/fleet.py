"""The fleet file of the simulator: that of the embedded stack, with larger counts, tenants, tables and settings."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from domain.capacity import CPU, CapacityKind
from domain.documents import DocumentPart, Level, RuleError
from domain.scheduling import MachineState, TenantState
from infra.documents import read_document
from infra.stack.fleet import ClusterEntry, Fleet, MachineEntry, RegionEntry
from research.supply.sources import CloudEntry, KeeperSettings, PoolEntry, Sources, sources_of
from research.traces.settings import TraceSettings
from simulation.supply import Machines

_KNOWN = "Regions of tables and pools, and GPU types of quotas, are those of the file"
_POOLS = "Pools have different regions or names, and a provider offers machines for each"


class ManyMachines(MachineEntry):
    """Machines as in the fleet file of `mizzen up`, with counts of up to a million."""

    count: int | None = Field(None, ge=1, le=1_000_000)


class ManyCluster(ClusterEntry):
    """A cluster with such machines."""

    machines: tuple[ManyMachines, ...]


class ManyRegion(RegionEntry):
    """A region with such clusters."""

    clusters: tuple[ManyCluster, ...]


class TenantEntry(DocumentPart):
    """A tenant with its level and quota. A workload's own priority applies if it is lower (a larger number)."""

    level: Level = 1
    quota: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Slots by GPU type; the quota of an absent type is 0."""
    cpus: float | None = Field(None, ge=0)
    """Cores; absent: no limit."""


class QuotaRule(DocumentPart):
    """Rule for the quotas of the trace's tenants that `tenants` lacks: shares of the supply of every GPU type."""

    in_proportion_to: Literal["gpu_hours", "workloads", "equal"] = "gpu_hours"
    of_supply: float = Field(0.9, ge=0, le=10)
    level: Level = 1


class SimulatedFleet(Fleet):
    """A fleet file for the simulator."""

    rules: ClassVar = (*Fleet.rules, _KNOWN, _POOLS)
    regions: tuple[ManyRegion, ...] = Field(min_length=1)
    tenants: dict[str, TenantEntry] = Field(default_factory=dict)
    quotas: QuotaRule | None = None
    """None: the default rule if `tenants` is empty; otherwise `tenants` must have every tenant of the trace."""
    tables: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """Regions that have each table. The regions of an absent table are drawn by its name."""
    simulation: TraceSettings = Field(default_factory=TraceSettings)
    pools: tuple[PoolEntry, ...] = ()
    providers: dict[str, CloudEntry] = Field(default_factory=dict)
    """Clouds on which pools launch machines."""
    capacity: KeeperSettings = KeeperSettings()

    @model_validator(mode="after")
    def _known(self) -> "SimulatedFleet":
        types = {e.gpu_type for r in self.regions for c in r.clusters for e in c.machines if e.gpu_type}
        offers = self.sources.offers()
        types |= {offer.shape.gpu_type for offer in offers if offer.shape.gpu_type}
        for tenant, entry in self.tenants.items():
            strange = sorted(set(entry.quota) - types)
            if strange:
                known = ", ".join(sorted(types))
                raise RuleError(_KNOWN, f"tenant {tenant}: quota of {strange[0]!r}: must be one of {known}")
        names = {region.name for region in self.regions}
        for table, regions in self.tables.items():
            strange = sorted(set(regions) - names)
            if strange:
                known = ", ".join(sorted(names))
                raise RuleError(_KNOWN, f"table {table}: regions {list(regions)}; must be one of {known}")
        for number, pool in enumerate(self.sources.pools.values()):
            if pool.region not in names:
                known = ", ".join(sorted(names))
                raise RuleError(_KNOWN, f"pools[{number}].region: {pool.region!r}: must be one of {known}")
            if not any(map(pool.takes, offers)):
                message = f"pools[{number}]: {pool.name}: no provider offers machines that match this pool"
                raise RuleError(_POOLS, message)
        if len(self.sources.pools) < len(self.pools):
            raise RuleError(
                _POOLS, "pools: two pools have the same region and name; the name must be unique in its region"
            )
        return self

    @cached_property
    def sources(self) -> Sources:
        """The clouds and pools that supply more machines."""
        return sources_of(self.pools, self.providers, self.capacity)

    def possible(self) -> Machines:
        """Returns every region's machines, with all machines that pools may launch."""
        return self.sources.possible(self.states())

    @property
    def rule(self) -> QuotaRule | None:
        """The rule for tenants that are absent in the file; None: the file must have every tenant."""
        return self.quotas or (None if self.tenants else QuotaRule())

    def states(self) -> dict[str, tuple[MachineState, ...]]:
        """Returns every region's static machines, all of them free."""
        out: dict[str, list[MachineState]] = {region.name: [] for region in self.regions}
        of = {(region.name, cluster.name): cluster for region in self.regions for cluster in region.clusters}
        for machine in self.machines():
            entry: MachineEntry = machine["entry"]
            milli = round(1000 * entry.cpus)
            terms = of[machine["region"], machine["cluster"]]
            prices = terms.prices or {}
            out[machine["region"]].append(
                MachineState(
                    machine["id"], machine["cluster"], entry.rack, entry.gpu_type, entry.gpus, entry.gpus, milli,
                    entry.memory, milli, entry.memory, (terms.capacity or CapacityKind.RESERVED).value,
                    prices.get(entry.gpu_type or "", 0.0), prices.get(CPU, 0.0),
                )
            )  # fmt: skip
        return {region: tuple(machines) for region, machines in out.items()}


def load_simulated_fleet(path: Path) -> SimulatedFleet:
    """Reads the fleet in a YAML file.

    Raises:
        ConfigurationError: the file cannot be read, or is invalid; the message lists every problem.
    """
    return read_document(SimulatedFleet, path, "fleet file")


def quotas_by_rule(rule: QuotaRule, weights: Mapping[str, float], slots: Mapping[str, int]) -> dict[str, TenantState]:
    """Returns the tenants of `weights` with quotas: their shares of `of_supply` times the supply of every GPU type.

    Quotas are rounded down, and the remaining slots go one by one to the largest remainders; ties are broken by name.
    """
    total = sum(weights.values())
    quota: dict[str, dict[str, int]] = {tenant: {} for tenant in weights}
    for gpu_type, count in slots.items():
        pot = int(rule.of_supply * count + 1e-9)
        exact = {tenant: pot * weight / total if total else 0.0 for tenant, weight in weights.items()}
        for tenant, share in exact.items():
            quota[tenant][gpu_type] = int(share)
        left = pot - sum(int(share) for share in exact.values()) if total else 0
        for tenant in sorted(exact, key=lambda t: (int(exact[t]) - exact[t], t))[:left]:
            quota[tenant][gpu_type] += 1
    return {tenant: TenantState(tenant, rule.level, quota[tenant], None, 0.0) for tenant in sorted(weights)}
