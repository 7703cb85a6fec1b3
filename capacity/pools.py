"""Pools: the desired number of machines, the allowed offers, and the changes that bring a pool to its size.

A pool is a group of launched machines, MAST's dynamic cluster (3.1). Its machines form one cluster for each zone and
capacity kind, because all machines of a cluster share both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from capacity.offers import Offer, OfferKey
from domain.capacity import CapacityKind
from domain.ids import joined
from domain.lifecycle.instances import InstancePhase

PoolKey = tuple[str, str]
"""Region and name."""
_HAD = (InstancePhase.REQUESTED, InstancePhase.LAUNCHING, InstancePhase.JOINING, InstancePhase.READY)
"""The phases of instances that count towards a pool's size."""


@dataclass(frozen=True)
class Pool:
    """The sizes of a pool, and the offers that it may use."""

    region: str
    name: str
    size: int
    """The desired number of machines; the minimum if the pool may grow."""
    providers: tuple[str, ...] = ()
    """The providers whose offers are allowed; empty: all. The same holds for the next three fields."""
    zones: tuple[str, ...] = ()
    kinds: tuple[CapacityKind, ...] = ()
    machine_types: tuple[str, ...] = ()
    max_usd_per_h: float | None = None
    """The highest allowed price of one machine."""
    max_size: int | None = None
    """The number of machines to which the pool may grow for waiting workloads; None: the pool does not grow."""
    idle_s: float = 600.0
    """A machine above `size` is ended after it has been idle for this long."""
    hold_s: float = inf
    """A machine that waits for the other machines of its workload is ended after it has been idle for this long."""
    buffer: int = 0
    """The number of idle machines that a growing pool keeps ready for new workloads."""
    tenants: frozenset[str] = frozenset()
    """The tenants whose workloads are the only ones on its machines; empty: those of any tenant."""

    @property
    def key(self) -> PoolKey:
        """The unique key of the pool."""
        return self.region, self.name

    @property
    def most(self) -> int:
        """The maximum number of machines."""
        return self.size if self.max_size is None else self.max_size

    def serves(self, tenant: str) -> bool:
        """Returns whether workloads of a tenant may run on its machines."""
        return not self.tenants or tenant in self.tenants

    def takes(self, offer: Offer) -> bool:
        """Returns whether the pool may use an offer."""
        allowed: Sequence[tuple[object, Collection[object]]] = (
            (offer.provider, self.providers),
            (offer.zone, self.zones),
            (offer.kind, self.kinds),
            (offer.shape.machine_type, self.machine_types),
        )
        return (
            offer.region == self.region
            and all(not names or value in names for value, names in allowed)
            and (self.max_usd_per_h is None or offer.usd_per_h <= self.max_usd_per_h)
        )


def wrong_size(size: int, max_size: int | None, buffer: int) -> tuple[str, str] | None:
    """Returns the name of an inconsistent size field and an error message; None: the sizes are consistent."""
    if max_size is not None and max_size < size:
        return "max_size", f"must be at least size, {size}; it is {max_size}"
    if buffer > (max_size or 0):
        most = "a buffer needs max_size" if max_size is None else f"max_size is {max_size}"
        return "buffer", f"must be at most max_size; it is {buffer}, and {most}"
    return None


def cluster_of(pool: str, offer: Offer) -> str:
    """Returns the cluster for the machines that a pool launches from an offer.

    Two providers may have zones of the same name, so the provider is part of it: its machines are in one network.
    """
    return joined(pool, offer.provider, offer.zone, offer.kind.value)


@dataclass(frozen=True)
class Instance:
    """An instance of a pool that is neither gone nor marked to end, with the facts that pool sizing needs."""

    id: str
    phase: InstancePhase
    busy: bool
    """Whether an attempt holds resources of the machine."""
    offer: Offer
    """The offer at the time of the request."""
    usable: bool = True
    """Whether the machine takes work, or the instance is not ready yet."""
    idle_s: float | None = None
    """The time for which the machine has been idle; None: it is busy or not ready."""
    claims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The workloads that wait for this machine (`capacity.scaling.Claims`)."""


@dataclass(frozen=True)
class Changes:
    """The launches and ends of a pool."""

    launch: list[Offer] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    """Ids of instances."""
    missing: int = 0
    """The number of wanted machines that no offer can supply now."""
    offered: bool = True
    """Valid with `missing`. True: all allowed offers were refused recently; False: there is no allowed offer."""


def changes(
    pool: Pool,
    instances: Sequence[Instance],
    offers: Sequence[Offer],
    refused: Collection[OfferKey] = (),
) -> Changes:
    """Returns the changes that bring a pool to its size: launches from the cheapest allowed offer, or ends.

    Args:
        pool: the pool's rules.
        instances: the pool's instances that are not gone.
        offers: the offers of all providers.
        refused: keys of offers that were refused recently; they are not used now.
    """
    had = [instance for instance in instances if instance.phase in _HAD]
    missing = pool.size - len(had)
    excess = len(had) - max(pool.size, pool.most)
    if excess > 0:
        # End idle instances before busy ones; among those, the earliest phase first, then the youngest.
        order = sorted(had, key=lambda i: i.id, reverse=True)
        order.sort(key=lambda i: (i.busy, _HAD.index(i.phase)))
        return Changes(end=[instance.id for instance in order[:excess]])
    return launches(pool, missing, offers, refused)


def launches(pool: Pool, missing: int, offers: Sequence[Offer], refused: Collection[OfferKey] = ()) -> Changes:
    """Returns `missing` launches of the cheapest allowed offer that was not refused recently."""
    fitting = [offer for offer in offers if pool.takes(offer)]
    possible = [offer for offer in fitting if offer.key not in refused]
    if missing <= 0 or not possible:
        return Changes(missing=max(0, missing), offered=bool(fitting))
    cheapest = min(possible, key=lambda offer: (offer.usd_per_h, offer.start_s, offer.key))
    return Changes(launch=[cheapest] * missing)
