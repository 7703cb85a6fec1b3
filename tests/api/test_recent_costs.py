"""Costs that open pages show: read once a minute for all, filtered for each key, and what happens if a read fails."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from api.fleet.recent_costs import RecentCosts
from infra.db.costs import CostDay
from infra.db.session import transaction

TODAY = datetime.now(UTC).date()


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _Reads:
    """Counts the reads of an engine, and makes them wait, or fail as if Postgres cancelled them."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        self.fails = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_begun = threading.Event()
        event.listen(engine, "before_cursor_execute", self._before)

    def _before(self, _c: Any, _u: Any, statement: str, *_: Any) -> None:
        if "cost_day" not in statement or not statement.startswith("with"):
            return
        self.count += 1
        self.has_begun.set()
        assert self.may_go_on.wait(60)
        if self.fails:
            raise OperationalError(statement, {}, Exception("canceling statement due to statement timeout"))


def _add(engine: Engine, tenant: str, usd: float, day: date = TODAY) -> None:
    with transaction(engine) as session:
        session.merge(
            CostDay(day=day, tenant=tenant, capacity="spot", resource="a100", hours=1.0, unpriced_h=0.0, usd=usd)
        )


def _usd(costs: RecentCosts, tenant: str | None, first: date = TODAY) -> dict[str, float]:
    return {one.tenant: one.usd for one in costs.get(first, TODAY, tenant).items}


def test_one_read_a_minute_serves_every_key(database: Engine) -> None:
    """Each key gets the rows of its tenant; other days are read for themselves."""
    clock, reads = _Clock(), _Reads(database)
    costs = RecentCosts(database, clock)
    _add(database, "vision", 3.0)
    _add(database, "speech", 4.0)
    _add(database, "vision", 7.0, TODAY - timedelta(days=1))
    assert _usd(costs, "vision") == {"vision": 3.0}
    assert _usd(costs, "speech") == {"speech": 4.0}
    assert _usd(costs, None) == {"vision": 3.0, "speech": 4.0}
    assert _usd(costs, "nobody") == {}
    assert reads.count == 1
    assert sum(one.usd for one in costs.get(TODAY - timedelta(days=1), TODAY, "vision").items) == 10.0
    assert reads.count == 2
    _add(database, "vision", 5.0)
    assert _usd(costs, "vision") == {"vision": 3.0}
    clock.now_s = 60.0
    assert _usd(costs, "vision") == {"vision": 5.0}


def test_requests_during_a_read_do_not_read_again(database: Engine) -> None:
    """While costs are read, requests return the costs before; without any, they wait for the same read."""
    clock, reads = _Clock(), _Reads(database)
    costs = RecentCosts(database, clock)
    _add(database, "vision", 3.0)
    reads.may_go_on.clear()
    with ThreadPoolExecutor(4) as threads:
        first = [threads.submit(_usd, costs, "vision") for _ in range(4)]
        assert reads.has_begun.wait(60)
        reads.may_go_on.set()
        assert [one.result(60) for one in first] == [{"vision": 3.0}] * 4
        assert reads.count == 1
        _add(database, "vision", 5.0)
        clock.now_s = 60.0
        reads.has_begun.clear()
        reads.may_go_on.clear()
        reader = threads.submit(_usd, costs, "vision")
        assert reads.has_begun.wait(60)
        assert _usd(costs, "vision") == {"vision": 3.0}
        reads.may_go_on.set()
        assert reader.result(60) == {"vision": 5.0}
    assert reads.count == 2


def test_a_read_that_fails(database: Engine) -> None:
    """Without older costs the error is raised and the next request reads again; with them, they stay for 15 minutes."""
    clock, reads = _Clock(), _Reads(database)
    costs = RecentCosts(database, clock)
    _add(database, "vision", 3.0)
    reads.fails = True
    for _ in range(2):
        with pytest.raises(OperationalError):
            _usd(costs, "vision")
    assert reads.count == 2
    reads.fails = False
    shown = costs.get(TODAY, TODAY, "vision")
    reads.fails, clock.now_s = True, 60.0
    for _ in range(3):
        assert costs.get(TODAY, TODAY, "vision").at == shown.at
    assert reads.count == 4  # It is not tried at each request.
    clock.now_s = 900.0
    with pytest.raises(OperationalError):
        _usd(costs, "vision")
    reads.fails = False
    _add(database, "vision", 5.0)
    assert _usd(costs, "vision") == {"vision": 5.0}
