"""The requirements on every provider (`capacity.provider.Provider`). `docs/providers.md` explains them."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from capacity.offers import Offer, Shape
from capacity.pools import cluster_of
from capacity.provider import FoundMachine, LaunchRefused, ProviderUnavailable, Refusal
from capacity.providers.registry import KINDS, STATIC
from capacity.providers.static import StaticProvider
from domain.capacity import CapacityKind
from domain.ids import is_name
from tests.capacity.bench import Bench
from tests.capacity.benches import BENCHES
from tests.capacity.requests import request_for


def test_every_kind_of_provider_is_tested() -> None:
    """Every registered kind of provider has a bench."""
    assert {name.partition(":")[0] for name in BENCHES} == set(KINDS)


@pytest.fixture(
    params=[
        pytest.param(
            name, marks=[pytest.mark.long, getattr(pytest.mark, kind)] if kind in ("kubernetes", "slurm") else []
        )
        for name in BENCHES
        if (kind := name.partition(":")[0]) != STATIC
    ]
)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """A `Bench` for each kind of provider that launches machines."""
    with BENCHES[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture
def offers(bench: Bench) -> list[Offer]:
    """The provider's offers, cheapest first."""
    return sorted(bench.provider.offers(), key=lambda offer: offer.usd_per_h)


def listed(bench: Bench, instance: str) -> list[FoundMachine]:
    """Returns the provider's machines of an instance, after waiting `lists_late_s` for its list to catch up."""
    time.sleep(bench.provider.lists_late_s)
    return [found for found in bench.provider.describe() if found.instance == instance and found.ended is None]


def assert_ends(bench: Bench, instance: str) -> None:
    """Asserts that the provider soon lists no machine of an instance: a machine's processes may need some seconds."""
    deadline_s = time.monotonic() + 30
    while left := listed(bench, instance):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.2)


@pytest.mark.rotating
def test_offers_are_well_formed(bench: Bench, offers: list[Offer]) -> None:
    """Offers have valid names, existing machine types and comparable prices, and their keys are unique."""
    assert len({offer.key for offer in offers}) == len(offers)
    for offer in offers:
        assert offer.provider == bench.provider.name
        assert is_name(offer.region)
        assert is_name(offer.zone)
        assert is_name(cluster_of("p", offer))
        assert (offer.shape.gpus > 0) == (offer.shape.gpu_type is not None)
        assert offer.shape.cpus_milli > 0
        assert offer.shape.memory_bytes > 0
        assert 0 <= offer.usd_per_h < float("inf")
        assert offer.start_s >= 0


def test_a_machine_is_launched_listed_and_ended(bench: Bench, offers: list[Offer]) -> None:
    """A machine is listed with its tag from launch to termination. Terminating it again is no error."""
    wanted = request_for(offers[0])
    native_id = bench.provider.launch(wanted)
    (found,) = listed(bench, wanted.instance)
    assert found.native_id == native_id
    assert abs(found.launched_at_s - time.time()) < 60
    bench.provider.terminate(native_id)
    assert_ends(bench, wanted.instance)
    bench.provider.terminate(native_id)


def test_one_token_is_one_machine(bench: Bench, offers: list[Offer]) -> None:
    """A repeated launch request, for example after a lost response, returns the same machine."""
    wanted = request_for(offers[0])
    assert bench.provider.launch(wanted) == bench.provider.launch(wanted)
    assert len(listed(bench, wanted.instance)) == 1
    other = request_for(offers[0])
    assert bench.provider.launch(other) != bench.provider.launch(wanted)


def test_a_token_that_was_used_launches_nothing_new(bench: Bench, offers: list[Offer]) -> None:
    """A late repetition of a launch request after the termination launches no machine."""
    wanted = request_for(offers[0])
    native_id = bench.provider.launch(wanted)
    bench.provider.terminate(native_id)
    try:
        assert bench.provider.launch(wanted) == native_id
    except LaunchRefused as refused:
        assert refused.refusal is Refusal.REQUEST
    assert_ends(bench, wanted.instance)


def test_what_it_does_not_have_is_ended_already(bench: Bench) -> None:
    """Terminating an unknown id is no error."""
    for native_id in ("", "987654", "987654.in-0", "i-0123456789abcdef0", "tr-no-such", "../../etc"):
        bench.provider.terminate(native_id)


def test_capacity_that_it_lacks_is_refused_as_such(bench: Bench, offers: list[Offer]) -> None:
    """A launch without capacity waits, or is refused with the provider's message and succeeds after a termination."""
    launched = []
    if bench.provider.queues:
        last = [bench.provider.launch(request_for(offers[0])) for _ in range(4)][-1]
        (waits,) = [found.waits for found in bench.provider.describe() if found.native_id == last]
        assert waits
        return
    with pytest.raises(LaunchRefused) as raised:
        for _ in range(4):
            launched.append(bench.provider.launch(request_for(offers[0])))
    assert len(launched) == 3
    assert raised.value.refusal in (Refusal.CAPACITY, Refusal.QUOTA)
    assert raised.value.words
    bench.provider.terminate(launched[0])
    assert bench.provider.launch(request_for(offers[0])) not in launched


def test_a_request_that_makes_no_sense_is_refused_for_good(bench: Bench, offers: list[Offer]) -> None:
    """A launch of a machine type that is not offered is refused permanently, and launches no machine."""
    wanted = request_for(replace(offers[0], shape=replace(offers[0].shape, machine_type="x9.nonsense")))
    with pytest.raises(LaunchRefused) as raised:
        bench.provider.launch(wanted)
    assert raised.value.refusal is Refusal.REQUEST
    assert listed(bench, wanted.instance) == []


def test_no_answer_says_so(bench: Bench, offers: list[Offer]) -> None:
    """An unavailable provider raises an error.

    It must not return an empty list, because that would end all its instances.
    """
    wanted = request_for(offers[0])
    native_id = bench.provider.launch(wanted)
    with bench.away():
        with pytest.raises(ProviderUnavailable):
            bench.provider.describe()
        with pytest.raises(ProviderUnavailable):
            bench.provider.launch(request_for(offers[0]))
        with pytest.raises(ProviderUnavailable):
            bench.provider.terminate(native_id)
    assert len(listed(bench, wanted.instance)) == 1


def test_static_machines_are_nobodys_to_launch_or_end() -> None:
    """The static provider has no offers and no list, and neither launches nor terminates machines."""
    provider = StaticProvider(STATIC)
    assert list(provider.offers()) == list(provider.describe()) == []
    offer = Offer(STATIC, "r", "z", CapacityKind.RESERVED, Shape("m", 0, None, 1000, 1 << 30), 0.0, 0.0)
    with pytest.raises(LaunchRefused, match="mizzen agent"):
        provider.launch(request_for(offer))
    provider.terminate("r/c/m")
