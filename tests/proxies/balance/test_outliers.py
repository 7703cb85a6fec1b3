"""Decisions about replicas that fail more often than others, on a simulated clock."""

import itertools
import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from proxies.balance.outliers import IN_A_ROW, OutlierChange, Outliers, ServerCounts


class _Replicas:
    """Replicas that answer requests, with the share of failures of each, seen once a second."""

    def __init__(self, *shares: float) -> None:
        self.shares = list(shares)
        self.outliers = Outliers()
        self.counts = [ServerCounts(0, 0) for _ in shares]
        self.waits_s: dict[str, float] = {}
        self.first_byte_s = [0.01] * len(shares)
        self.now_s = 0.0
        self._random = random.Random(1)

    def ejected(self) -> set[str]:
        return {name for name, one in self.outliers.ejections.items() if not one.is_trial}

    def second(self, requests: int = 10) -> dict[str, OutlierChange]:
        """Lets each replica that is not ejected get so many requests."""
        self.now_s += 1
        for number, share in enumerate(self.shares):
            if str(number) not in self.ejected():
                failed = sum(self._random.random() < share for _ in range(requests))
                self.counts[number] += ServerCounts(requests - failed, failed)
        counts = {str(number): one for number, one in enumerate(self.counts)}
        times_s = {
            name: [self.first_byte_s[int(name)]] * requests for name in counts.keys() - self.ejected()
        }  # fmt: skip
        return self.outliers.observe(counts, self.waits_s, None, self.now_s, times_s)

    def until(self, is_so: Callable[[dict[str, OutlierChange]], bool], most_s: int = 1000) -> float:
        """Runs seconds until one has these verdicts, and returns the time."""
        for _ in range(most_s):
            if is_so(self.second()):
                return self.now_s
        raise AssertionError(f"not within {most_s} s")


def test_a_broken_replica_is_tried_ever_more_rarely_and_admitted_when_it_works() -> None:
    """The pauses are 10, 20, 40 s; each ends with a trial, whose first failure ejects it again."""
    replicas = _Replicas(0.0, 1.0, 0.0)
    at_s = [replicas.until(lambda verdicts: verdicts.get("1") is OutlierChange.TRIED) for _ in range(3)]
    assert [after - before for before, after in itertools.pairwise(at_s)] == [21, 41]
    assert replicas.outliers.ejections["1"].since_s == 2.0  # The first counts are only a start.
    replicas.shares[1] = 0.0
    replicas.until(lambda verdicts: verdicts.get("1") is OutlierChange.ADMITTED)
    assert all(not replicas.second() for _ in range(100))


def test_a_replica_that_fails_often_is_ejected_without_a_row() -> None:
    """A third of its requests fail, never three in a row within a second that has an answer."""
    replicas = _Replicas(0.01, 0.35, 0.01, 0.01)
    replicas.until(lambda verdicts: verdicts == {"1": OutlierChange.EJECTED}, 20)


def test_requests_that_fail_everywhere_eject_none() -> None:
    """The same share of failures on all replicas is not theirs: neither half of the requests nor all of them."""
    for share in (0.05, 0.5, 1.0):
        replicas = _Replicas(share, share, share, share)
        assert sum(OutlierChange.EJECTED in replicas.second().values() for _ in range(300)) == 0


def test_a_hung_replica_is_ejected_relative_to_the_others() -> None:
    """It is tried again once its requests no longer wait."""
    replicas = _Replicas(0.0, 0.0, 0.0)
    replicas.second()
    replicas.waits_s = {"2": 2.5}
    assert replicas.second() == {"2": OutlierChange.EJECTED}
    assert "waited 2.5 s for the first byte, more than 2 s" in replicas.outliers.ejections["2"].why
    assert all(not replicas.second() for _ in range(30))
    replicas.waits_s = {}
    replicas.until(lambda verdicts: verdicts == {"2": OutlierChange.TRIED}, 11)


def test_slow_requests_everywhere_eject_none() -> None:
    """While requests wait as long on all replicas, something behind them is to blame."""
    replicas = _Replicas(0.0, 0.0, 0.0)
    replicas.second()
    replicas.waits_s = dict.fromkeys("012", 5.0)
    assert replicas.second() == {}


def test_a_slow_replica_is_ejected_relative_to_the_others() -> None:
    """Also one that no request waits long enough for. It is admitted once its answers are as fast as the others'."""
    replicas = _Replicas(0.0, 0.0, 0.0)
    replicas.second()
    replicas.first_byte_s[1] = 0.2
    assert all(not replicas.second() for _ in range(30))
    replicas.first_byte_s[1] = 0.5
    replicas.until(lambda verdicts: verdicts == {"1": OutlierChange.EJECTED}, 10)
    assert replicas.outliers.ejections["1"].why.endswith("is 0.5 s, that of the others 0.01 s")
    replicas.until(lambda verdicts: verdicts == {"1": OutlierChange.TRIED}, 11)
    assert replicas.second(1) == {"1": OutlierChange.EJECTED}
    replicas.first_byte_s[1] = 0.02
    replicas.until(lambda verdicts: verdicts == {"1": OutlierChange.ADMITTED}, 30)
    replicas.first_byte_s = [5.0, 5.0, 5.0]
    assert all(not replicas.second() for _ in range(30))


def test_nobody_knows_at_first_how_long_an_answer_takes() -> None:
    """The first request after a start of the balancer may take its time, while the other replicas have none."""
    replicas = _Replicas(0.0, 0.0, 0.0)
    replicas.waits_s = {"2": 30.0}
    assert all(not replicas.second(0) for _ in range(30))


def test_one_failure_ejects_none() -> None:
    """Fewer failures in a row than the limit are not enough."""
    outliers = Outliers()
    names = ("a", "b")
    outliers.observe(dict.fromkeys(names, ServerCounts(0, 0)), {}, None, 0.0)
    failed = {"a": ServerCounts(0, IN_A_ROW - 1), "b": ServerCounts(5, 0)}
    assert outliers.observe(failed, {}, None, 1.0) == {}
    assert outliers.observe({**failed, "a": ServerCounts(0, IN_A_ROW)}, {}, None, 2.0) == {"a": OutlierChange.EJECTED}


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=6), st.data())
def test_at_most_half_are_ejected(shares: list[float], data: st.DataObject) -> None:
    """Also when replicas begin to fail, recover and leave."""
    replicas = _Replicas(*shares)
    for _ in range(30):
        replicas.second()
        assert len(replicas.ejected()) <= len(replicas.shares) // 2
        if data.draw(st.booleans()):
            replicas.shares[data.draw(st.integers(0, len(replicas.shares) - 1))] = data.draw(
                st.sampled_from([0.0, 1.0])
            )
        if len(replicas.shares) > 1 and data.draw(st.integers(0, 9)) == 0:
            replicas.shares.pop()
            replicas.counts.pop()
