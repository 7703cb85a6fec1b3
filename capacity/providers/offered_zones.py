"""The offers of a cluster manager, from its settings: each machine type in each zone, at a fixed price."""

from collections.abc import Mapping
from typing import Protocol

from pydantic import Field

from capacity.offers import Offer, Shape
from capacity.provider import LaunchRefused, LaunchRequest, Refusal
from domain.capacity import CapacityKind
from infra.machine_shape import MachineShape


class PricedShape(MachineShape):
    """The resources of a job, all of which its machine offers, and the price of such a machine."""

    usd_per_h: float = Field(0.0, ge=0)


class OfferedZone(Protocol):
    """The settings of a zone on which its offers depend."""

    @property
    def kind(self) -> CapacityKind:
        """The capacity kind of its machines."""

    @property
    def price_factor(self) -> float:
        """The factor on the prices of machine types."""


def offers_of(
    provider: str, region: str, start_s: float, zones: Mapping[str, OfferedZone], types: Mapping[str, PricedShape]
) -> list[Offer]:
    """Returns the offers of a provider; `start_s`: the expected time from a launch until the agent announces itself."""
    shapes = [
        (Shape(name, one.gpus, one.gpu_type, round(one.cpus * 1000), one.memory), one.usd_per_h)
        for name, one in types.items()
    ]
    return [
        Offer(provider, region, name, zone.kind, shape, usd_per_h * zone.price_factor, start_s)
        for name, zone in zones.items()
        for shape, usd_per_h in shapes
    ]


def check_offered(
    provider: str, request: LaunchRequest, zones: Mapping[str, OfferedZone], types: Mapping[str, PricedShape]
) -> None:
    """Checks that the settings still contain the zone and the machine type of a request.

    Raises:
        LaunchRefused: they do not.
    """
    zone, name = request.offer.zone, request.offer.shape.machine_type
    if zone not in zones or name not in types:
        raise LaunchRefused(Refusal.REQUEST, f"no {name} in zone {zone} in the settings of provider {provider}")
