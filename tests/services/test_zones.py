"""The zones and offers of a service, and the workload of a replica."""

import pytest

from capacity.offers import Offer, Shape
from domain.capacity import CapacityKind, dedicated
from domain.service import ReplicaSpread, ResourceOption, ServiceSpec
from domain.serving_spec import ServingSpec
from domain.spec import ResourceSpec, WorkloadSpec
from domain.spread import SpreadLevel
from services.workloads import replica_name, replica_workload
from services.zones import ZONE_OFFERS, cheapest_on_demand, spot_zones

_A100 = ResourceOption(resources=ResourceSpec(gpus=1, gpu_types=("a100",)), spot=True)
_V100 = ResourceOption(resources=ResourceSpec(gpus=1, gpu_types=("v100",)), spot=True, zone="z-2")
_SPEC = ServiceSpec(name="chat", tenant="t", options=(_A100, _V100), script="serve", serving=ServingSpec(port=8080))


def _offer(zone: str, gpu_type: str, usd_per_h: float, kind: CapacityKind = CapacityKind.SPOT, gpus: int = 1) -> Offer:
    shape = Shape(f"{gpu_type}-{gpus}", gpus, gpu_type, 8000, 32 << 30)
    return Offer("cloud", "r", zone, kind, shape, usd_per_h, 30.0)


def test_each_zone_has_the_cheapest_offer_of_the_preferred_option() -> None:
    """A preferred type wins over a cheaper one; zones without a fitting offer are left out."""
    offers = [
        _offer("z-1", "a100", 2.0, gpus=4),
        _offer("z-1", "a100", 1.0),
        _offer("z-1", "v100", 0.1),
        _offer("z-2", "v100", 0.2),
        _offer("z-3", "v100", 0.2),
        _offer("z-4", "a100", 3.0, CapacityKind.ON_DEMAND),
    ]
    zones = spot_zones(_SPEC, offers)
    assert [(one.zone.name, one.offer) for one in zones] == [("r/z-1", offers[1]), ("r/z-2", offers[3])]
    assert ZONE_OFFERS.validate_json(ZONE_OFFERS.dump_json(zones)) == zones


def test_types_of_gpus_match_in_any_case() -> None:
    """An option finds a provider's GPU type also if the two are spelt with different capitals."""
    capitals = ResourceOption(resources=ResourceSpec(gpus=1, gpu_types=("V100", "A100")), spot=True)
    offers = [_offer("z-1", "a100", 1.0), _offer("z-2", "A100", 1.0), _offer("z-3", "a100-80gb", 1.0)]
    zones = spot_zones(_SPEC.model_copy(update={"options": (capitals,)}), offers)
    assert [one.offer for one in zones] == offers[:2]


def test_a_zone_with_replicas_stays_while_it_is_not_offered() -> None:
    """Only if the specification still accepts it; the newest offer of a zone that is offered is used."""
    known = spot_zones(_SPEC, [_offer("z-1", "a100", 1.0), _offer("z-2", "v100", 0.2)])
    assert spot_zones(_SPEC, [], known) == known
    dearer = _offer("z-1", "a100", 2.0)
    assert [one.offer for one in spot_zones(_SPEC, [dearer], known)] == [dearer, known[1].offer]
    assert spot_zones(_SPEC.model_copy(update={"options": (_A100,)}), [], known) == known[:1]


def test_options_without_spot_have_no_zones() -> None:
    """Spot machines are used only where an option allows them."""
    spec = _SPEC.model_copy(update={"options": (_A100.model_copy(update={"spot": False}),)})
    assert spot_zones(spec, [_offer("z-1", "a100", 1.0)]) == []


def test_on_demand_replicas_avoid_refused_offers() -> None:
    """The cheapest offer is used, then the next one after a refusal, and the first one again if all were refused."""
    cheap, dear = (_offer(zone, "a100", usd, CapacityKind.ON_DEMAND) for zone, usd in (("z-1", 3.0), ("z-2", 4.0)))
    offers = [dear, cheap, _offer("z-1", "a100", 0.5)]
    assert cheapest_on_demand(_SPEC, offers, []) == cheap
    assert cheapest_on_demand(_SPEC, offers, [cheap.key]) == dear
    assert cheapest_on_demand(_SPEC, offers, [cheap.key, dear.key]) == cheap
    assert cheapest_on_demand(_SPEC, offers[2:], []) is None


def test_on_demand_replicas_are_spread_over_zones() -> None:
    """Of equally cheap offers, that in the zone with the fewest replicas is used; over zones, also a dearer one."""
    first, second, dear = (
        _offer(zone, "a100", usd, CapacityKind.ON_DEMAND) for zone, usd in (("z-1", 3.0), ("z-2", 3.0), ("z-3", 4.0))
    )
    offers, held = [first, second, dear], {(first.region, "z-1"): 1, (first.region, "z-2"): 1}
    assert cheapest_on_demand(_SPEC, offers, [], {(first.region, "z-1"): 1}) == second
    assert cheapest_on_demand(_SPEC, offers, [], held) == first
    over_zones = _SPEC.model_copy(update={"spread": ReplicaSpread(over=SpreadLevel.ZONE)})
    assert cheapest_on_demand(over_zones, offers, [], held) == dear
    packed = _SPEC.model_copy(update={"spread": ReplicaSpread(over=None)})
    assert cheapest_on_demand(packed, offers, [], {(first.region, "z-1"): 1}) == first


def test_the_workload_of_a_replica() -> None:
    """It has one attempt, serves, and runs on its own cluster, or on shared machines that are not spot.

    It gets all cores and all memory of machines of its own.
    """
    shape = Shape("a2", 1, "a100", 12_000, 85 << 30)
    own = replica_workload(_SPEC, 7, level=4, cluster="sv-1-z-1-spot", option=_A100, shape=shape, spread=None)
    assert (own.name, own.level, own.one_attempt, own.serving) == ("chat-7", 4, True, _SPEC.serving)
    assert own.kinds == (dedicated("sv-1-z-1-spot"),)
    resources = own.jobs[0].resources
    assert (resources.gpus, resources.cpus_milli, resources.memory_bytes) == (1, 12_000, 85 << 30)
    assert WorkloadSpec.model_validate(own.model_dump(mode="json")) == own
    shared = replica_workload(_SPEC, 8, level=None, cluster=None, option=_V100, shape=None, spread=None)
    assert (shared.kinds, shared.jobs[0].resources.gpu_types) == (("reserved", "on_demand"), ("v100",))


@pytest.mark.parametrize("name", ["a", "a" * 63, "a" * 60 + "-b"])
def test_names_of_replicas_are_names(name: str) -> None:
    """The name of a replica's workload is valid and ends with the replica's number, however long the service's is."""
    found = replica_name(name, 1234)
    assert len(found) <= 63 and found.endswith("-1234") and "--" not in found
