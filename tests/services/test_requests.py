"""Counts of balancers, as decisions take them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine, delete

from activities.services.replica_rows import LiveReplica, take_ongoing, take_requests
from domain.phases import Phase
from infra.db.services import BalancerReport, ServiceReplica, ServiceRequests, ServiceRow
from tests.activities.world import World

NOW_S = 1_000_000.0


def test_counts_are_taken_once(database: Engine, tmp_path: Path) -> None:
    """Each second counts once, for a minute; silence and a clock that was set back mean that they are unknown."""
    world = World(database, tmp_path)
    world.tenant()
    with world.session() as session:
        row = ServiceRow(id="sv-1", tenant="t", name="chat")
        session.add(row)
        session.flush()

        def count(first: int, last: int) -> None:
            for second in range(first, last):
                session.add(
                    ServiceRequests(service="sv-1", second=second, balancer="b", requests=10, failed=0, cut=0)
                )  # fmt: skip
            session.flush()

        def take(now_s: float) -> int | None:
            return take_requests(session, row, 30.0, now_s)

        assert take(NOW_S) is None
        count(999_800, 999_998)
        assert take(NOW_S) == 0  # The seconds were over at the first decision.
        count(999_998, 1_000_010)
        assert take(NOW_S + 10) == 100
        assert take(NOW_S + 12) == 20
        count(1_000_010, 1_000_400)
        assert take(NOW_S + 400) == 600  # The last minute.
        assert take(NOW_S + 3600) is None  # A worker whose clock is an hour fast.
        assert take(NOW_S + 400) is None
        count(1_000_400, 1_000_403)
        assert take(NOW_S + 405) == 50


def test_a_draining_replica_is_idle_once_all_balancers_say_so(database: Engine, tmp_path: Path) -> None:
    """A report of before the drain, and a balancer that sends it requests or is silent, leave it unknown."""
    world = World(database, tmp_path)
    world.tenant()
    now = datetime.now(UTC)
    one = ServiceReplica(number=0, draining_at=now - timedelta(seconds=5))

    def ongoing(*reports: tuple[float, int, bool]) -> tuple[int | None, int]:
        """Returns the requests of the replica, and of all: of balancers with the age of a report and what it says."""
        with world.session() as session:
            session.execute(delete(BalancerReport))
            for number, (age_s, count, drained) in enumerate(reports):
                told = {"replica": 0, "ongoing": count, "drained": drained, "ejected_s": None, "why": None}
                session.add(
                    BalancerReport(
                        service="sv-1", balancer=f"b{number}", reported_at=now - timedelta(seconds=age_s),
                        waiting=1, replicas=[told] if count >= 0 else [],
                    )
                )  # fmt: skip
            session.flush()
            live = LiveReplica(one, Phase.RUNNING, {}, False)
            waiting, total = take_ongoing(session, "sv-1", {0: live})
            assert waiting == sum(age_s < 25 for age_s, *_ in reports)
            return live.ongoing, total

    with world.session() as session:
        session.add(ServiceRow(id="sv-1", tenant="t", name="chat"))
    assert ongoing() == (None, 0)
    assert ongoing((1, 0, True), (2, -1, True)) == (0, 0)
    assert ongoing((1, 0, True), (1, 3, True)) == (3, 3)
    assert ongoing((1, 0, True), (1, 0, False)) == (None, 0)
    assert ongoing((1, 0, True), (6, 0, True)) == (None, 0)
    assert ongoing((1, 0, True), (60, 9, True)) == (None, 0)
    assert ongoing((1, 0, True), (3600, 9, True)) == (0, 0)
