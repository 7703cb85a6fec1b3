"""The simulated fleet: the embedded stack's fleet file with larger counts, tenants with quotas, tables, assumptions."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from domain.capacity import CPU, CapacityKind
from domain.scheduling import MachineState, TenantState
from infra.errors import ConfigurationError
from infra.stack.fleet import ClusterEntry, Fleet, MachineEntry, RegionEntry
from simulation.settings import Settings, problems
from simulation.supply.sources import CloudEntry, KeeperSettings, Machines, PoolEntry, Sources, sources_of


class ManyMachines(MachineEntry):
    """Machines as in the fleet file of `mizzen up`, in any number."""

    count: int | None = Field(None, ge=1, le=1_000_000)


class ManyCluster(ClusterEntry):
    """A dynamic cluster of any size."""

    machines: tuple[ManyMachines, ...]


class ManyRegion(RegionEntry):
    """A region of any size."""

    clusters: tuple[ManyCluster, ...]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TenantEntry(_Part):
    """A tenant: its level and quota. A workload's own priority counts where it is lower (a larger number)."""

    level: int = Field(1, ge=1, le=7)
    quota: dict[str, int] = Field(default_factory=dict)
    """GPU type to slots; a type that is not there is a quota of 0."""
    cpus: float | None = Field(None, ge=0)
    """Cores; absent: no limit."""

    @model_validator(mode="after")
    def _not_negative(self) -> "TenantEntry":
        for gpu_type, slots in self.quota.items():
            if slots < 0:
                raise ValueError(f"quota of {gpu_type} is {slots}; must be 0 slots or more")
        return self


class QuotaRule(_Part):
    """Quotas for the trace's tenants that `tenants` does not name: shares of the supply of every GPU type."""

    in_proportion_to: Literal["gpu_hours", "workloads", "equal"] = "gpu_hours"
    of_supply: float = Field(0.9, ge=0, le=10)
    level: int = Field(1, ge=1, le=7)


class SimulatedFleet(Fleet):
    """A fleet file for the simulator."""

    regions: tuple[ManyRegion, ...] = Field(min_length=1)
    tenants: dict[str, TenantEntry] = Field(default_factory=dict)
    quotas: QuotaRule | None = None
    """None: the default rule where `tenants` is empty; otherwise every tenant has to be named."""
    tables: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Table to the regions that have it. Of a table that is not here, the regions are drawn by its name."""
    simulation: Settings = Field(default_factory=Settings)
    pools: tuple[PoolEntry, ...] = ()
    providers: dict[str, CloudEntry] = Field(default_factory=dict)
    """Clouds of which pools have machines."""
    capacity: KeeperSettings = KeeperSettings()

    @model_validator(mode="after")
    def _known(self) -> "SimulatedFleet":
        types = {e.gpu_type for r in self.regions for c in r.clusters for e in c.machines if e.gpu_type}
        offers = self.sources.offers()
        types |= {offer.shape.gpu_type for offer in offers if offer.shape.gpu_type}
        for tenant, entry in self.tenants.items():
            strange = sorted(set(entry.quota) - types)
            if strange:
                raise ValueError(f"tenant {tenant}: quota of {strange[0]!r}; GPU types are {', '.join(sorted(types))}")
        names = {region.name for region in self.regions}
        for table, regions in self.tables.items():
            strange = sorted(set(regions) - names)
            if strange or not regions:
                raise ValueError(f"table {table}: regions {list(regions)}; must be one of {', '.join(sorted(names))}")
        for number, pool in enumerate(self.sources.pools.values()):
            if pool.region not in names:
                raise ValueError(f"pools[{number}].region: {pool.region!r}: must be one of {', '.join(sorted(names))}")
            if not any(map(pool.takes, offers)):
                raise ValueError(f"pools[{number}]: {pool.name}: no provider offers machines that it may take")
        if len(self.sources.pools) < len(self.pools):
            raise ValueError("pools: two have one region and name; each must have another")
        return self

    @cached_property
    def sources(self) -> Sources:
        """Where more machines come from."""
        return sources_of(self.pools, self.providers, self.capacity)

    def possible(self) -> Machines:
        """Every region's machines, and those that pools may come to have."""
        return self.sources.possible(self.states())

    @property
    def rule(self) -> QuotaRule | None:
        """The rule for tenants that the file does not name; None: they must not be."""
        return self.quotas or (None if self.tenants else QuotaRule())

    def states(self) -> dict[str, tuple[MachineState, ...]]:
        """Every region's machines, all of them free."""
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
    """The fleet in a YAML file.

    Raises:
        ConfigurationError: the file cannot be read, or says something that cannot be; every problem is named.
    """
    try:
        return SimulatedFleet.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"fleet file {path}: {error}") from None
    except ValidationError as error:
        raise ConfigurationError(f"fleet file {path}: " + "; ".join(problems(error))) from None


def supply(machines: Mapping[str, tuple[MachineState, ...]]) -> dict[str, int]:
    """GPU slots by type, over all regions; types by name."""
    out: dict[str, int] = defaultdict(int)
    for states in machines.values():
        for m in states:
            if m.gpu_type:
                out[m.gpu_type] += m.gpus
    return dict(sorted(out.items()))


def quotas_by_rule(rule: QuotaRule, weights: Mapping[str, float], slots: Mapping[str, int]) -> dict[str, TenantState]:
    """A tenant state for each of `weights`: of every GPU type its part of `of_supply` times the supply.

    Rounded down, and what that leaves goes one by one to the largest remainders (of equal ones by name).
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
