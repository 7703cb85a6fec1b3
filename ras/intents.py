"""What operators want of a pool: its size for each GPU type, and what must not reduce it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, inf

from ras.supply import PooledType


@dataclass(frozen=True)
class Intent:
    """The intended size of one pool, with its buffers and rules."""

    pool: str
    sizes: Mapping[str, int]
    """Units by resource: GPUs by GPU type, or cores as `cpu`."""
    failure_buffer: float = 0.0
    """Share of the size that the pool has in addition, because single machines fail."""
    survives_loss: bool = True
    """Whether the pool keeps its size and its buffer when any one fault domain is lost."""
    max_share: float = 1.0
    """Spread: machines of one fault domain count at most for this share of what the pool needs. Above 0."""
    kinds: frozenset[str] = frozenset()
    """The capacity kinds of machines that the pool may get; empty: any."""
    max_usd_per_h: float | None = None
    """The highest price of a machine that the pool may get; None: any price."""

    def needs(self, resource: str) -> int:
        """Returns the units that the pool must have when one fault domain is lost: its size and its buffer."""
        size = self.sizes.get(resource, 0)
        return size + ceil(round(size * self.failure_buffer, 6))

    def most_of_a_domain(self, resource: str) -> float:
        """Returns how many units of one fault domain count at most; infinite if `max_share` is 1."""
        return floor(round(self.needs(resource) * self.max_share, 6)) if self.max_share < 1 else inf

    def may_get(self, type_: PooledType) -> bool:
        """Returns whether the pool may get machines of a type. Machines that it has already may stay in any case."""
        if type_.launched_for:
            return type_.launched_for == self.pool
        cheap = self.max_usd_per_h is None or type_.usd_per_h <= self.max_usd_per_h
        return cheap and (not self.kinds or type_.capacity in self.kinds)
