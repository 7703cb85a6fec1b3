"""Where machines come from, as the fleet file says it: clouds and pools."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from capacity.offers import Offer
from capacity.pools import Pool, PoolKey, cluster_of, wrong_size
from domain.capacity import CPU, CapacityKind
from domain.ids import NAME_PATTERN, machine_id
from domain.scheduling import MachineState
from infra.config import CapacitySettings
from providers.trace.market import offers_of
from providers.trace.settings import TraceSettings

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Machines = Mapping[str, tuple[MachineState, ...]]
_LIVE = CapacitySettings()


class CloudEntry(TraceSettings):
    """A cloud, as an installation's settings say it under `providers:`."""

    kind: Literal["trace"] = "trace"


class PoolEntry(BaseModel):
    """A pool, as `mizzen pools` shows it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    region: Name
    name: Name
    size: int = Field(0, ge=0)
    max_size: int | None = Field(None, ge=0)
    idle_s: float = Field(Pool.idle_s, ge=0)
    buffer: int = Field(0, ge=0)
    providers: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    kinds: tuple[CapacityKind, ...] = ()
    machine_types: tuple[str, ...] = ()
    max_usd_per_h: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _sized(self) -> "PoolEntry":
        if (wrong := wrong_size(self.size, self.max_size, self.buffer)) is not None:
            raise ValueError(": ".join(wrong))
        return self

    def pool(self) -> Pool:
        """It for the rules."""
        return Pool(**{name: getattr(self, name) for name in PoolEntry.model_fields})


class KeeperSettings(BaseModel):
    """The part of `capacity:` that a simulation has, with the live defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    interval_s: float = Field(_LIVE.interval_s, gt=0)
    refused_pause_s: float = Field(_LIVE.refused_pause_s, ge=0)


@dataclass(frozen=True)
class Sources:
    """All of them."""

    pools: Mapping[PoolKey, Pool] = field(default_factory=dict)
    clouds: Mapping[str, TraceSettings] = field(default_factory=dict)
    keeper: KeeperSettings = field(default_factory=KeeperSettings)

    def offers(self) -> list[Offer]:
        """What all clouds offer."""
        return [offer for name, settings in self.clouds.items() for offer in offers_of(name, settings)]

    def possible(self, machines: Machines) -> Machines:
        """The machines of a fleet, and those that its pools may come to have."""
        out = dict(machines)
        for region, machine in self.at_most():
            out[region] = (*out.get(region, ()), machine)
        return out

    def at_most(self) -> Iterator[tuple[str, MachineState]]:
        """Machines, with their regions, that pools may come to have: of each offer that a pool may take its maximum.

        So what fits on them may run some day, and what fits on none of them never will.
        """
        for pool in self.pools.values():
            for offer in self.offers():
                for number in range(max(pool.size, pool.most) if pool.takes(offer) else 0):
                    yield pool.region, machine_of(f"{offer.shape.machine_type}-{number}", pool.name, offer)


def machine_of(name: str, pool: str, offer: Offer) -> MachineState:
    """A free machine of a pool."""
    shape, prices, cluster = offer.shape, offer.prices(), cluster_of(pool, offer)
    amounts = shape.gpus, shape.gpus, shape.cpus_milli, shape.memory_bytes, shape.cpus_milli, shape.memory_bytes
    return MachineState(
        machine_id(offer.region, cluster, name), cluster, "rack-1", shape.gpu_type, *amounts, offer.kind.value,
        prices.get(shape.gpu_type or "", 0.0), prices.get(CPU, 0.0),
    )  # fmt: skip


def usd_per_h(machine: MachineState) -> float:
    """What an hour of a machine costs: of its GPUs and of its cores, as far as either has a price."""
    return machine.gpus * machine.gpu_usd_per_h + machine.cpus_milli * machine.core_usd_per_h / 1000


def sources_of(pools: tuple[PoolEntry, ...], clouds: Mapping[str, Any], keeper: KeeperSettings) -> Sources:
    """The sources of a fleet file's entries."""
    return Sources({(entry.region, entry.name): entry.pool() for entry in pools}, dict(clouds), keeper)
