"""The bandwidth budget and its shares, with a fake clock."""

import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from infra.copies import open_copy_store
from infra.copies.bandwidth import Bandwidth, Order
from infra.copies.copy import copy_object, copy_prefix

BUDGET = 1000.0


def serve(order: Order, wanted: dict[str, list[int]], until_s: float = float("inf")) -> tuple[Counter[str], float]:
    """Simulates shares with up to two waiting requests each; returns the bytes of each share and the end time."""
    queues = {share: list(sizes) for share, sizes in wanted.items()}
    places = [order.ask(share, queue.pop(0)) for share, queue in queues.items() for _ in range(min(2, len(queue)))]
    now_s, got = 0.0, Counter[str]()
    while places and now_s < until_s:
        # Only the first request in the order gets the bytes or a delay; for all others `take` returns None.
        place = min(places)
        assert all(order.take(other, now_s) is None for other in places if other is not place)
        delay_s = order.take(place, now_s)
        assert delay_s is not None
        if delay_s:
            now_s += delay_s
            continue
        got[place.share] += place.size_bytes
        places.remove(place)
        if queues[place.share]:
            places.append(order.ask(place.share, queues[place.share].pop(0)))
    return got, now_s


def shares(**fractions: float) -> Order:
    order = Order(BUDGET)
    for share, fraction in fractions.items():
        order.add(share, fraction)
    return order


@pytest.mark.parametrize("seed", range(5))
def test_shares_that_want_all_get_their_fractions(seed: int) -> None:
    """Two busy shares get their fractions of the budget, within the size of one part, for any part sizes."""
    rng = random.Random(seed)
    wanted = {share: [rng.randrange(1, 400) for _ in range(3000)] for share in ("nightly", "on demand")}
    got, end_s = serve(shares(nightly=0.25, **{"on demand": 0.75}), wanted, until_s=300)
    assert got.total() == pytest.approx(BUDGET * (end_s + 1), abs=400)
    assert got["nightly"] == pytest.approx(0.25 * got.total(), abs=800)


def test_what_one_does_not_use_goes_to_the_others() -> None:
    """If only one share is busy, it gets the whole budget, even if the fractions add up to less than 1."""
    got, end_s = serve(shares(nightly=0.1, **{"on demand": 0.2}), {"nightly": [100] * 500})
    assert got == {"nightly": 50_000}
    assert end_s == pytest.approx((50_000 - 100) / BUDGET - 1), "expected a free first second and unpaid last part"


def test_a_share_that_comes_back_saves_nothing_up() -> None:
    """A share that was idle for an hour gets only its fraction afterwards."""
    order = shares(a=0.5, b=0.5)
    serve(order, {"a": [1000] * 3600})
    got, _ = serve(order, {"a": [100] * 2000, "b": [100] * 2000}, until_s=3700)
    assert abs(got["a"] - got["b"]) <= 1000, "the shares differ by more than one part"


def test_a_large_part_owes() -> None:
    """After a request that exceeds the available bytes, the next request waits until the debt is paid."""
    order = shares(a=1.0)
    first, second = order.ask("a", 5000), order.ask("a", 1)
    assert order.take(second, 10.0) is None, "the second request was served before the first"
    assert order.take(first, 10.0) == 0.0
    assert order.take(second, 10.0) == 4.0
    assert order.take(second, 14.0) == 0.0


def test_who_leaves_is_not_waited_for() -> None:
    """A request that was withdrawn with `leave` does not block other requests."""
    order = shares(a=0.5, b=0.5)
    first, second = order.ask("a", 10), order.ask("b", 10)
    order.leave(first)
    assert order.take(second, 0.0) == 0.0


def test_fractions_are_checked() -> None:
    """A budget of 0, a fraction of 0, and fractions of more than 1 in total are errors with the valid values."""
    with pytest.raises(ValueError, match=r"budget_bytes_per_s=0: must be greater than 0"):
        Bandwidth(0)
    bandwidth = Bandwidth(1)
    bandwidth.share("a", 0.75)
    bandwidth.share("a", 0.5)
    for fraction, message in ((0.0, "above 0 and at most 1"), (1.5, "at most 1"), (0.6, "only 0.5 of the budget")):
        with pytest.raises(ValueError, match=rf"fraction={fraction} of share 'b': .*{message}"):
            bandwidth.share("b", fraction)


class Hands:
    """A fake clock that advances only when `wait` is called."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, condition: threading.Condition, delay_s: float | None) -> None:
        if delay_s is None:
            condition.wait()
        else:
            self.now_s += delay_s


def test_copies_draw_what_they_move(bucket_of: Callable[[str], str]) -> None:
    """Concurrent copies on two shares together use the budget; a copy that has nothing to move uses none."""
    source, target, hands = open_copy_store(bucket_of("file")), open_copy_store(bucket_of("file")), Hands()
    bandwidth = Bandwidth(BUDGET, clock=hands, wait=hands.wait)
    names = {"nightly": 0.5, "on demand": 0.5}
    for key in names:
        source.put(key, random.Random(1).randbytes(20_500))

    def copy_all() -> None:
        def one(key: str, fraction: float) -> None:
            copy_object(source, target, key, name="n", part_bytes=500, share=bandwidth.share(key, fraction))

        threads = [threading.Thread(target=one, args=pair) for pair in names.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    copy_all()
    assert hands.now_s == pytest.approx((41_000 - 500) / BUDGET - 1)
    copy_all()
    assert hands.now_s == pytest.approx((41_000 - 500) / BUDGET - 1)


def test_small_objects_draw_what_they_move(bucket_of: Callable[[str], str]) -> None:
    """Small objects that are copied concurrently use the budget of their share."""
    source, target, hands = open_copy_store(bucket_of("file")), open_copy_store(bucket_of("file")), Hands()
    bandwidth = Bandwidth(BUDGET, clock=hands, wait=hands.wait)
    for number in range(100):
        source.put(f"t/{number}", random.Random(number).randbytes(100))
    for _ in range(2):
        copy_prefix(source, target, "t/", name="n", share=bandwidth.share("nightly", 1.0))
        assert hands.now_s == pytest.approx((10_000 - 100) / BUDGET - 1)
