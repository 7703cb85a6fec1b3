"""The offers of all providers, as services see them."""

import threading
from collections.abc import Sequence

from activities.services.offers import Offers
from capacity.offers import Offer, Shape
from capacity.provider import ProviderUnavailable
from capacity.providers.static import StaticProvider
from domain.capacity import CapacityKind

_OFFER = Offer("p", "west", "z", CapacityKind.SPOT, Shape("small", 1, "a100", 1000, 1 << 30), 1.0, 10.0)


class _Provider(StaticProvider):
    """A provider whose offers fail, or are held up, as the test says."""

    def __init__(self) -> None:
        super().__init__("p")
        self.reads = 0
        self.fails = False
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def offers(self) -> Sequence[Offer]:
        self.reads += 1
        self.asked.set()
        self.answers.wait(30)
        if self.fails:
            raise ProviderUnavailable("no answer")
        return [_OFFER]


def test_offers_are_kept_for_a_while() -> None:
    """They are read again after a minute; the last known ones stand in for a provider that does not answer.

    A provider that has never answered is asked again after some seconds, not in each decision.
    """
    provider, now_s = _Provider(), [0.0]
    offers = Offers({"p": provider}, lambda: now_s[0])
    provider.fails = True
    assert offers.read() is None
    provider.fails = False
    assert (offers.read(), provider.reads) == (None, 1)
    now_s[0] = 5.0
    assert offers.read() == offers.read() == [_OFFER]
    assert provider.reads == 2
    provider.fails, now_s[0] = True, 66.0
    assert offers.read() == [_OFFER]
    assert provider.reads == 3


def test_a_provider_that_hangs_holds_up_one_caller() -> None:
    """Other callers get the last known offers meanwhile."""
    provider, now_s = _Provider(), [0.0]
    offers = Offers({"p": provider}, lambda: now_s[0])
    assert offers.read() == [_OFFER]
    provider.answers.clear()
    provider.asked.clear()
    now_s[0] = 61.0
    held = threading.Thread(target=offers.read)
    held.start()
    assert provider.asked.wait(30)
    assert offers.read() == [_OFFER]
    provider.answers.set()
    held.join(30)
    assert not held.is_alive()
