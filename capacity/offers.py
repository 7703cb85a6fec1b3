"""Offers of a provider: machines of a shape, in a zone, with a capacity kind, at a price."""

from dataclasses import dataclass

from domain.capacity import CPU, CapacityKind

OfferKey = tuple[str, str, str, str]
"""Provider, zone, capacity kind and machine type."""


@dataclass(frozen=True)
class Shape:
    """A machine type, and the resources of such a machine that workloads may use."""

    machine_type: str
    """The provider's name of the type."""
    gpus: int
    gpu_type: str | None
    cpus_milli: int
    memory_bytes: int


@dataclass(frozen=True)
class Offer:
    """Machines of one shape that a provider may launch in one zone."""

    provider: str
    """The provider's name in the installation's settings."""
    region: str
    """The mizzen region of the machines."""
    zone: str
    kind: CapacityKind
    shape: Shape
    usd_per_h: float
    """The price of one machine."""
    start_s: float
    """The expected time from the request until the machine's agent announces itself."""

    @property
    def key(self) -> OfferKey:
        """The unique key of the offer."""
        return self.provider, self.zone, self.kind.value, self.shape.machine_type

    def prices(self) -> dict[str, float]:
        """Returns the price per resource (`domain.capacity`): per GPU or, if the machine has none, per core."""
        if self.shape.gpus:
            return {str(self.shape.gpu_type): self.usd_per_h / self.shape.gpus}
        return {CPU: self.usd_per_h * 1000 / self.shape.cpus_milli}
