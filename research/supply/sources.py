"""The clouds and pools of a fleet file, which supply machines during a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from capacity.offers import Offer
from capacity.pools import Pool, PoolKey, cluster_of, wrong_size
from capacity.providers.trace.market import offers_of
from capacity.providers.trace.settings import TraceProviderSettings
from capacity.scaling import Shortage
from domain.capacity import CPU, CapacityKind
from domain.documents import DocumentPart, Name, RuleError
from domain.ids import machine_id
from domain.scheduling import MachineState
from infra.config.scheduling import CapacitySettings
from simulation.meter import Meter
from simulation.supply import Keeper, Machines, Supply
from simulation.transitions import Transitions

_LIVE = CapacitySettings()
_SIZES = "max_size is at least size, and a buffer is at most max_size"


class CloudEntry(TraceProviderSettings):
    """A cloud, in the format of an entry of `providers:` in the settings of an installation."""

    kind: Literal["trace"] = "trace"


class PoolEntry(DocumentPart):
    """A pool, with the fields that `mizzen pools` shows."""

    rules: ClassVar = (_SIZES,)

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
            raise RuleError(_SIZES, ": ".join(wrong))
        return self

    def pool(self) -> Pool:
        """Returns the entry as the pool rules (`capacity`) take it."""
        return Pool(**{name: getattr(self, name) for name in PoolEntry.model_fields})


class KeeperSettings(DocumentPart):
    """The settings of `capacity:` that apply to a simulation, with the live defaults."""

    interval_s: float = Field(_LIVE.interval_s, gt=0)
    refused_pause_s: float = Field(_LIVE.refused_pause_s, ge=0)


@dataclass(frozen=True)
class Sources(Supply):
    """All pools and clouds, with the settings of the capacity loop."""

    pools: Mapping[PoolKey, Pool] = field(default_factory=dict)
    clouds: Mapping[str, TraceProviderSettings] = field(default_factory=dict)
    settings: KeeperSettings = field(default_factory=KeeperSettings)

    @property
    def grows(self) -> bool:
        """Whether there are pools."""
        return bool(self.pools)

    def offers(self) -> list[Offer]:
        """Returns the offers of all clouds."""
        return [offer for name, settings in self.clouds.items() for offer in offers_of(name, settings)]

    def possible(self, machines: Machines) -> Machines:
        """Returns the machines of a fleet, with all machines that its pools may launch."""
        out = dict(machines)
        for region, machine in self.at_most():
            out[region] = (*out.get(region, ()), machine)
        return out

    def keeper(
        self, transitions: Transitions, meter: Meter, waiting: Callable[[], list[Shortage]], seed: int
    ) -> Keeper:
        """Returns the simulated capacity loop."""
        from research.supply.keeper import SimulatedKeeper

        return SimulatedKeeper(self, transitions, meter, waiting, seed)

    def at_most(self) -> Iterator[tuple[str, MachineState]]:
        """Yields (region, machine) for the machines that pools may launch: for each matching offer, the pool's maximum.

        A workload that does not fit on these machines, or on the static ones, can never run.
        """
        for pool in self.pools.values():
            for offer in self.offers():
                for number in range(max(pool.size, pool.most) if pool.takes(offer) else 0):
                    yield pool.region, machine_of(f"{offer.shape.machine_type}-{number}", pool.name, offer)


def machine_of(name: str, pool: str, offer: Offer) -> MachineState:
    """Returns a free machine of a pool."""
    shape, prices, cluster = offer.shape, offer.prices(), cluster_of(pool, offer)
    amounts = shape.gpus, shape.gpus, shape.cpus_milli, shape.memory_bytes, shape.cpus_milli, shape.memory_bytes
    return MachineState(
        machine_id(offer.region, cluster, name), cluster, "rack-1", shape.gpu_type, *amounts, offer.kind.value,
        prices.get(shape.gpu_type or "", 0.0), prices.get(CPU, 0.0),
    )  # fmt: skip


def sources_of(pools: tuple[PoolEntry, ...], clouds: Mapping[str, Any], keeper: KeeperSettings) -> Sources:
    """Returns the sources of a fleet file's entries."""
    return Sources({(entry.region, entry.name): entry.pool() for entry in pools}, dict(clouds), keeper)
