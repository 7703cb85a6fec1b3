"""Which instances a pool launches and ends, and the comparison of the ledger with a provider's list."""

from dataclasses import replace

import pytest

from capacity.ledger_audit import LedgerDifferences, LedgerEntry, compare
from capacity.offers import Offer, Shape
from capacity.pools import Changes, Instance, Pool, changes, cluster_of
from capacity.provider import FoundMachine
from domain.capacity import CapacityKind
from domain.ids import is_name
from domain.lifecycle.instances import InstancePhase

SHAPE = Shape("small", 4, "a100", 16_000, 64 << 30)
CHEAP = Offer("sim", "west", "za", CapacityKind.SPOT, SHAPE, 4.0, 30.0)
DEAR = replace(CHEAP, zone="zb", kind=CapacityKind.ON_DEMAND, usd_per_h=12.0)
POOL = Pool("west", "burst", 2)


def instance(number: int, phase: InstancePhase = InstancePhase.READY, *, busy: bool = False) -> Instance:
    """Returns an instance; greater numbers are younger."""
    return Instance(f"in-{number}", phase, busy, CHEAP)


def test_what_is_missing_is_launched_where_it_is_cheapest() -> None:
    """Each missing machine is launched with the cheapest offer; instances on their way are not missing."""
    assert changes(POOL, [], [DEAR, CHEAP]) == Changes(launch=[CHEAP, CHEAP])
    under_way = [instance(1, InstancePhase.REQUESTED), instance(2, InstancePhase.JOINING)]
    assert changes(POOL, under_way[:1], [DEAR, CHEAP]) == Changes(launch=[CHEAP])
    assert changes(POOL, under_way, [DEAR, CHEAP]) == Changes()


def test_what_was_refused_is_not_asked_again() -> None:
    """After a refusal the next cheapest offer is used; without one, the result has the number of missing machines."""
    assert changes(POOL, [], [DEAR, CHEAP], {CHEAP.key}) == Changes(launch=[DEAR, DEAR])
    assert changes(POOL, [], [CHEAP], {CHEAP.key}) == Changes(missing=2)
    assert changes(POOL, [instance(1)], []) == Changes(missing=1, offered=False)


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ({"zones": ("zb",)}, DEAR),
        ({"kinds": (CapacityKind.ON_DEMAND,)}, DEAR),
        ({"kinds": (CapacityKind.RESERVED,)}, None),
        ({"providers": ("sim",)}, CHEAP),
        ({"providers": ("aws",)}, None),
        ({"machine_types": ("small", "large")}, CHEAP),
        ({"machine_types": ("large",)}, None),
        ({"max_usd_per_h": 4.0}, CHEAP),
        ({"max_usd_per_h": 3.99}, None),
        ({"region": "east"}, None),
    ],
)
def test_a_pool_takes_only_what_it_may(rule: dict[str, object], wanted: Offer | None) -> None:
    """Each rule of a pool limits the offers."""
    launch = changes(replace(POOL, size=1, **rule), [], [DEAR, CHEAP]).launch  # type: ignore[arg-type]
    assert launch == ([] if wanted is None else [wanted])


def test_what_is_too_much_ends_where_it_hurts_least() -> None:
    """Surplus instances end in this order: idle before busy, not ready before ready, youngest first."""
    there = [
        instance(1, busy=True),
        instance(2),
        instance(3),
        instance(4, InstancePhase.JOINING),
        instance(5, InstancePhase.REQUESTED),
        instance(6, busy=True),
    ]
    order = ["in-5", "in-4", "in-3", "in-2", "in-6", "in-1"]
    for size in range(6):
        assert changes(replace(POOL, size=size), there, [CHEAP]) == Changes(end=order[: 6 - size])


def test_clusters_of_a_pool_have_names() -> None:
    """Each provider, zone and capacity kind of a pool has its own cluster, also if their names are long or odd."""
    names = {cluster_of("burst", offer) for offer in (CHEAP, DEAR, replace(CHEAP, provider="K8s_1"))}
    assert names == {"burst-sim-za-spot", "burst-sim-zb-on-demand", "burst-k8s-1-za-spot"}
    zones = [replace(CHEAP, zone="z" * 63), replace(CHEAP, zone="z" * 62 + "a")]
    long = {cluster_of("p" * 20, replace(zone, kind=kind)) for zone in zones for kind in CapacityKind}
    assert len(long) == 2 * len(CapacityKind)
    assert all(map(is_name, names | long))


def test_prices_are_of_gpus_or_of_cores() -> None:
    """A machine's price is per GPU; without GPUs it is per core."""
    assert CHEAP.prices() == {"a100": 1.0}
    cpus = replace(CHEAP, shape=replace(SHAPE, gpus=0, gpu_type=None))
    assert cpus.prices() == {"cpu": 0.25}


def test_the_ledger_is_compared_with_what_a_provider_has() -> None:
    """The comparison finds strays, duplicates and missing machines, except those that may still be launching."""
    entries = {
        "in-1": LedgerEntry("a", 0.0),
        "in-2": LedgerEntry("b", 0.0),
        "in-3": LedgerEntry("c", 95.0),
        "in-4": LedgerEntry(None, None),
        "in-5": LedgerEntry("e", 0.0),
    }
    found = [
        FoundMachine("a", "in-1", 0),
        FoundMachine("x", "in-1", 0),
        FoundMachine("d", "in-4", 0),
        FoundMachine("z", "in-9", 0),
    ]
    assert compare(entries, found, 100.0, 10.0) == LedgerDifferences(
        strays={"z": "in-9"}, seconds={"x": "in-1"}, missing=["in-2", "in-5"]
    )
    assert compare(entries, found, 100.0, 1000.0).missing == []
