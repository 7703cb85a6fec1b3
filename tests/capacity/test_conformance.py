"""What mizzen relies on of every provider (`capacity.providers.Provider`). `docs/providers.md` tells it in words."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from capacity.offers import Offer, Shape
from capacity.pools import cluster_of
from capacity.providers import Found, LaunchRefused, LaunchRequest, ProviderUnavailable, Refusal
from domain.capacity import CapacityKind
from domain.ids import is_name, new_instance_id
from providers.registry import KINDS, STATIC
from providers.static import StaticProvider
from tests.capacity.benches import BENCHES, Bench


def test_every_kind_of_provider_is_tested() -> None:
    """One that is registered and not listed would be trusted untested."""
    assert set(BENCHES) == set(KINDS)


@pytest.fixture(params=[kind for kind in BENCHES if kind != STATIC])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """One of each kind that launches machines."""
    with BENCHES[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture
def offers(bench: Bench) -> list[Offer]:
    """What it offers, the cheapest first."""
    return sorted(bench.provider.offers(), key=lambda offer: offer.usd_per_h)


def request_for(offer: Offer, instance: str | None = None) -> LaunchRequest:
    """A launch of an offer."""
    instance = instance or new_instance_id()
    return LaunchRequest(instance, f"{offer.region}/{cluster_of('p', offer)}/{instance}", offer, "file:///b", "secret")


def listed(bench: Bench, instance: str) -> list[Found]:
    """What it has of an instance, once its list has caught up: `lists_late_s` is its own word."""
    time.sleep(bench.provider.lists_late_s)
    return [found for found in bench.provider.describe() if found.instance == instance]


def test_offers_are_well_formed(bench: Bench, offers: list[Offer]) -> None:
    """Names that mizzen can use, machines that exist, prices that can be compared; one key is one offer."""
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
    """By its tag, from the launch until it is ended; then it is not in the list. Ending it again is no error."""
    wanted = request_for(offers[0])
    native_id = bench.provider.launch(wanted)
    (found,) = listed(bench, wanted.instance)
    assert found.native_id == native_id
    assert abs(found.launched_at_s - time.time()) < 60
    bench.provider.terminate(native_id)
    assert listed(bench, wanted.instance) == []
    bench.provider.terminate(native_id)


def test_one_token_is_one_machine(bench: Bench, offers: list[Offer]) -> None:
    """A launch that is asked for again, since its answer was lost, gives the same machine."""
    wanted = request_for(offers[0])
    assert bench.provider.launch(wanted) == bench.provider.launch(wanted)
    assert len(listed(bench, wanted.instance)) == 1
    other = request_for(offers[0])
    assert bench.provider.launch(other) != bench.provider.launch(wanted)


def test_a_token_that_was_used_launches_nothing_new(bench: Bench, offers: list[Offer]) -> None:
    """A late repetition of a launch, after its machine was ended."""
    wanted = request_for(offers[0])
    native_id = bench.provider.launch(wanted)
    bench.provider.terminate(native_id)
    try:
        assert bench.provider.launch(wanted) == native_id
    except LaunchRefused as refused:
        assert refused.refusal is Refusal.REQUEST
    assert listed(bench, wanted.instance) == []


def test_what_it_does_not_have_is_ended_already(bench: Bench) -> None:
    """An id that it never had, in a form that might be its own."""
    for native_id in ("", "i-0123456789abcdef0", "tr-no-such", "../../etc"):
        bench.provider.terminate(native_id)


def test_capacity_that_it_lacks_is_refused_as_such(bench: Bench, offers: list[Offer]) -> None:
    """And is there again when a machine is ended. The words are the provider's."""
    launched = []
    with pytest.raises(LaunchRefused) as raised:
        for _ in range(4):
            launched.append(bench.provider.launch(request_for(offers[0])))
    assert len(launched) == 3
    assert raised.value.refusal in (Refusal.CAPACITY, Refusal.QUOTA)
    assert raised.value.words
    bench.provider.terminate(launched[0])
    assert bench.provider.launch(request_for(offers[0])) not in launched


def test_a_request_that_makes_no_sense_is_refused_for_good(bench: Bench, offers: list[Offer]) -> None:
    """A type of machine that is not offered. Nothing is launched."""
    wanted = request_for(replace(offers[0], shape=replace(offers[0].shape, machine_type="x9.nonsense")))
    with pytest.raises(LaunchRefused) as raised:
        bench.provider.launch(wanted)
    assert raised.value.refusal is Refusal.REQUEST
    assert listed(bench, wanted.instance) == []


def test_no_answer_says_so(bench: Bench, offers: list[Offer]) -> None:
    """Never that there is nothing: a list that is empty because nobody answered would end whatever there is."""
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
    """The provider of machines that nobody launched has none of its own."""
    provider = StaticProvider(STATIC)
    assert list(provider.offers()) == list(provider.describe()) == []
    offer = Offer(STATIC, "r", "z", CapacityKind.RESERVED, Shape("m", 0, None, 1000, 1 << 30), 0.0, 0.0)
    with pytest.raises(LaunchRefused, match="mizzen agent"):
        provider.launch(request_for(offer))
    provider.terminate("r/c/m")
