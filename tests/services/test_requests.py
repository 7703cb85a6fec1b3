"""Counts of balancers, as decisions take them."""

from pathlib import Path

from sqlalchemy import Engine

from activities.services.replica_rows import take_requests
from infra.db.services import ServiceRequests, ServiceRow
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
