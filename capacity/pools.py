"""Pools: how many machines of which offers there are to be, and what is to be launched and ended for that.

A pool is MAST's dynamic cluster (3.1), seen from where its machines come from. Its machines are in one cluster for each
zone and kind of capacity, since machines share both with their cluster.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from capacity.offers import Offer, OfferKey
from domain.capacity import CapacityKind
from lifecycle.instances import InstancePhase

PoolKey = tuple[str, str]
"""Region and name."""
_HAD = (InstancePhase.REQUESTED, InstancePhase.LAUNCHING, InstancePhase.JOINING, InstancePhase.READY)
"""Phases of instances that a pool has, or is about to have."""


@dataclass(frozen=True)
class Pool:
    """How many machines there are to be, and which."""

    region: str
    name: str
    size: int
    """Machines that there are to be, or at least where it may grow."""
    providers: tuple[str, ...] = ()
    """Whose offers it may take; empty: any. So are the following."""
    zones: tuple[str, ...] = ()
    kinds: tuple[CapacityKind, ...] = ()
    machine_types: tuple[str, ...] = ()
    max_usd_per_h: float | None = None
    """Of one machine; dearer offers are not taken."""
    max_size: int | None = None
    """It grows for what waits, up to so many; None: it does not."""
    idle_s: float = 600.0
    """A machine above `size` that has had no work for so long is ended."""
    buffer: int = 0
    """Of a pool that grows: so many machines without work there are to be for what comes next."""

    @property
    def key(self) -> PoolKey:
        """What tells one pool from another."""
        return self.region, self.name

    @property
    def most(self) -> int:
        """Machines at most."""
        return self.size if self.max_size is None else self.max_size

    def takes(self, offer: Offer) -> bool:
        """Whether it may have machines of an offer."""
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
    """The field of a pool's sizes that does not go with the others, and what would be right; None: all go together."""
    if max_size is not None and max_size < size:
        return "max_size", f"must be at least the size, {size}, it is {max_size}"
    if buffer > (max_size or 0):
        most = "only a pool with max_size has one" if max_size is None else f"max_size is {max_size}"
        return "buffer", f"must be at most max_size, it is {buffer}, and {most}"
    return None


def cluster_of(pool: str, offer: Offer) -> str:
    """The cluster in which a pool's machines of an offer are."""
    return f"{pool}-{offer.zone}-{offer.kind.value}".replace("_", "-")


@dataclass(frozen=True)
class Instance:
    """An instance of a pool that is not gone, and not to end, as far as it matters for the pool's size."""

    id: str
    phase: InstancePhase
    busy: bool
    """Something is held on its machine."""
    offer: Offer
    """As it was when the instance was asked for."""
    usable: bool = True
    """It is on its way, or its machine takes work."""
    idle_s: float | None = None
    """For how long it has had no work; None: it has, or is not ready."""
    claims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The workloads that wait for it (`capacity.scaling.Claims`)."""


@dataclass(frozen=True)
class Changes:
    """What is to be done for a pool."""

    launch: list[Offer] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    """Ids of instances."""
    missing: int = 0
    """Machines that nobody can be asked for now."""
    offered: bool = True
    """With `missing`: there are offers that it may take, and all of them were refused lately."""


def changes(
    pool: Pool,
    instances: Sequence[Instance],
    offers: Sequence[Offer],
    refused: Collection[OfferKey] = (),
) -> Changes:
    """What brings a pool to its size: the cheapest offers that it may take, or ends of those that cost least to end.

    Args:
        pool: its rules.
        instances: all of it that are not gone.
        offers: of all providers.
        refused: keys of offers that were refused lately, which are not asked now.
    """
    had = [instance for instance in instances if instance.phase in _HAD]
    missing = pool.size - len(had)
    excess = len(had) - max(pool.size, pool.most)
    if excess > 0:
        # Those first that are furthest from working, then those that do nothing, then the youngest.
        order = sorted(had, key=lambda i: i.id, reverse=True)
        order.sort(key=lambda i: (i.busy, _HAD.index(i.phase)))
        return Changes(end=[instance.id for instance in order[:excess]])
    return launches(pool, missing, offers, refused)


def launches(pool: Pool, missing: int, offers: Sequence[Offer], refused: Collection[OfferKey] = ()) -> Changes:
    """So many machines of the cheapest offer that a pool may take and that was not refused lately."""
    fitting = [offer for offer in offers if pool.takes(offer)]
    possible = [offer for offer in fitting if offer.key not in refused]
    if missing <= 0 or not possible:
        return Changes(missing=max(0, missing), offered=bool(fitting))
    cheapest = min(possible, key=lambda offer: (offer.usd_per_h, offer.start_s, offer.key))
    return Changes(launch=[cheapest] * missing)
