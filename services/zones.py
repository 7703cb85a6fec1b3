"""The zones in which a service may launch machines, from the offers of the providers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from capacity.offers import Offer, Shape
from domain.capacity import CapacityKind
from domain.service import ResourceOption, ServiceSpec
from domain.spread import SpreadLevel
from services.spot.values import Zone


@dataclass(frozen=True)
class ZoneOffer:
    """A zone for the policy, with the offer that a launch in it uses."""

    zone: Zone
    offer: Offer


ZONE_OFFERS = TypeAdapter(list[ZoneOffer])
"""Writes zones as values of JSON, and reads them."""


def option_of(spec: ServiceSpec, offer: Offer) -> ResourceOption | None:
    """Returns the first option of a service that an offer satisfies; None: there is none.

    An on-demand offer satisfies an option for spot machines as well, because on-demand replicas stand in for spot ones.
    """
    for option in spec.options:
        wanted: Sequence[tuple[str | None, str]] = (
            (option.provider, offer.provider), (option.region, offer.region), (option.zone, offer.zone),
        )  # fmt: skip
        allowed = offer.kind is not CapacityKind.SPOT or option.spot
        if allowed and all(name is None or name == there for name, there in wanted) and _holds(offer.shape, option):
            return option
    return None


def spot_zones(spec: ServiceSpec, offers: Iterable[Offer], held: Iterable[ZoneOffer] = ()) -> list[ZoneOffer]:
    """Returns the zones in which spot replicas of a service may be launched, sorted by name.

    In each zone, the cheapest offer of the first option that any of its offers satisfies is used. A zone of `held`, in
    which the service has replicas, stays a zone while it is not offered: otherwise a provider that offers nothing for a
    moment would cost replicas that serve.
    """
    best: dict[str, tuple[tuple[int, float, tuple[str, ...]], Offer]] = {}
    for offer in offers:
        option = option_of(spec, offer)
        if offer.kind is not CapacityKind.SPOT or option is None:
            continue
        key = (spec.options.index(option), offer.usd_per_h, offer.key)
        name = f"{offer.region}/{offer.zone}"
        if name not in best or key < best[name][0]:
            best[name] = key, offer
    found = {one.zone.name: one for one in held if option_of(spec, one.offer) is not None}
    found |= {name: ZoneOffer(Zone(name, o.region, o.usd_per_h), o) for name, (_, o) in best.items()}
    return [found[name] for name in sorted(found)]


def cheapest_on_demand(
    spec: ServiceSpec,
    offers: Iterable[Offer],
    refused: Iterable[tuple[str, str, str, str]],
    held: Mapping[tuple[str, str], int] = {},
) -> Offer | None:
    """Returns the cheapest on-demand offer that a service may use and that was not refused recently; None: none is.

    If every such offer was refused recently, the cheapest one is returned nevertheless: a service without replicas must
    keep trying. `held` is the number of other replicas by region and zone. Of equally cheap offers, that in the zone
    with the fewest replicas is returned; if the service is spread over zones, this comes before the price.
    """
    fitting = [o for o in offers if o.kind is CapacityKind.ON_DEMAND and option_of(spec, o) is not None]
    keys, over = set(refused), spec.spread.over
    open_ = [offer for offer in fitting if offer.key not in keys] or fitting

    def order(offer: Offer) -> tuple[object, ...]:
        many = 0 if over is None else held.get((offer.region, offer.zone), 0)
        return many if over is SpreadLevel.ZONE else 0, offer.usd_per_h, many, offer.start_s, offer.key

    return min(open_, key=order, default=None)


def _holds(shape: Shape, option: ResourceOption) -> bool:
    # Documents may write GPU types in any case: a provider's types are not known when a document is read.
    there = (shape.gpu_type or "").casefold()
    asked = next((name for name in option.resources.gpu_types if name.casefold() == there), None)
    return option.resources.fits(
        gpu_type=asked, gpus=shape.gpus, cpus_milli=shape.cpus_milli, memory_bytes=shape.memory_bytes
    )
