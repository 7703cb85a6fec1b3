"""The machines and offers of a region, counted by fault domain, machine type and pool."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

NO_POOL = ""
"""The name that stands for machines without a pool."""


@dataclass(frozen=True, order=True)
class PooledType:
    """What machines must have in common to be interchangeable for pools."""

    name: str
    resource: str
    """What a pool's size counts: a GPU type, or `cpu` for machines without GPUs."""
    units: int
    """Number of GPUs of one machine, or of its cores."""
    usd_per_h: float = 0.0
    """The price of one machine."""
    capacity: str = "reserved"
    """The capacity kind."""
    launched_for: str = NO_POOL
    """The pool for which a provider launched them, which keeps them; empty: they may be moved."""


@dataclass(frozen=True)
class PooledMachine:
    """One machine of the region."""

    id: str
    domain: str
    """Its fault domain."""
    type: PooledType
    pool: str = NO_POOL
    busy: bool = False
    """Whether a workload holds resources of the machine."""


@dataclass(frozen=True)
class OfferedMachines:
    """Machines that a provider can launch."""

    domain: str
    type: PooledType
    count: int


CellKey = tuple[str, PooledType]
"""Fault domain and machine type."""


@dataclass
class Cell:
    """All machines of one type in one fault domain."""

    idle: Counter[str] = field(default_factory=Counter)
    """Number of idle machines by pool."""
    busy: Counter[str] = field(default_factory=Counter)
    """Number of machines in use by pool."""
    offered: int = 0
    """Number of machines that could be launched."""

    def held(self, pool: str) -> int:
        """Returns how many of its machines a pool has now."""
        return self.idle[pool] + self.busy[pool]

    @property
    def present(self) -> int:
        """The number of machines that exist."""
        return self.idle.total() + self.busy.total()


Supply = Mapping[CellKey, Cell]


def aggregate(machines: Iterable[PooledMachine], offers: Iterable[OfferedMachines] = ()) -> Supply:
    """Counts machines and offers, sorted by fault domain and type."""
    cells: dict[CellKey, Cell] = defaultdict(Cell)
    for machine in machines:
        cell = cells[machine.domain, machine.type]
        (cell.busy if machine.busy else cell.idle)[machine.pool] += 1
    for offer in offers:
        cells[offer.domain, offer.type].offered += offer.count
    return dict(sorted(cells.items()))
