"""What a provider offers: machines of a shape, in a zone, of a kind of capacity, at a price."""

from dataclasses import dataclass

from domain.capacity import CPU, CapacityKind

OfferKey = tuple[str, str, str, str]
"""Provider, zone, kind of capacity, type of machine."""


@dataclass(frozen=True)
class Shape:
    """A type of machine, and what of it work may use."""

    machine_type: str
    """As its provider names it."""
    gpus: int
    gpu_type: str | None
    cpus_milli: int
    memory_bytes: int


@dataclass(frozen=True)
class Offer:
    """Machines of one shape that a provider may launch in one zone."""

    provider: str
    """As the installation's settings name it."""
    region: str
    """Mizzen's region in which they would be."""
    zone: str
    kind: CapacityKind
    shape: Shape
    usd_per_h: float
    """Of one machine."""
    start_s: float
    """Expected from the request until its agent is there."""

    @property
    def key(self) -> OfferKey:
        """What tells one offer from another."""
        return self.provider, self.zone, self.kind.value, self.shape.machine_type

    def prices(self) -> dict[str, float]:
        """The price of the machine as prices of its parts (`domain.capacity`): by GPU, or by core where it has none."""
        if self.shape.gpus:
            return {str(self.shape.gpu_type): self.usd_per_h / self.shape.gpus}
        return {CPU: self.usd_per_h * 1000 / self.shape.cpus_milli}
