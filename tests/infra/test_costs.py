"""Costs of workloads, compared with a sum over minutes, and the history of prices."""

import random
from collections import defaultdict
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, delete, func, select, text, update
from sqlalchemy.exc import IntegrityError

from domain.capacity import CapacityKind
from domain.reasons import Reason, ReasonCode
from infra.db.costs import CostPending, costs, costs_of, count_ended, ended_totals
from infra.db.models import Allocation, Attempt, Cluster, ClusterPrice, Region, Workload
from infra.db.session import transaction
from infra.db.tenants import Tenant

T0 = datetime(2026, 3, 1, 18, tzinfo=UTC)
Held = tuple[str, str, str, int, float, datetime, datetime]
"""Tenant, workload, cluster, GPUs (of type `a` in the first cluster, `b` in the other), cores, from, to."""


def _write(database: Engine, held: list[Held], prices: dict[str, list[tuple[datetime, dict[str, float], str]]]) -> None:
    with transaction(database) as session:
        session.add(Region(name="r", bucket_url="file:///x"))
        session.add_all(Tenant(name=name, level=3) for name in ("t", "u"))
        session.flush()
        session.add_all(Cluster(region="r", name=name) for name in ("c1", "c2"))
        for tenant, workload in sorted({(t, w) for t, w, *_ in held}):
            session.add(Workload(id=workload, tenant=tenant, name=workload, spec={}, phase="succeeded"))
        session.flush()
        for cluster, rows in prices.items():
            session.add_all(
                ClusterPrice(region="r", cluster=cluster, since=since, prices=p, capacity=k) for since, p, k in rows
            )
        for number, (_, workload, cluster, gpus, cores, begun_at, ended_at) in enumerate(held, 1):
            machine, gpu_type = f"r/{cluster}/m", {"c1": "a", "c2": "b"}[cluster] if gpus else None
            jobs = [{"job": "j", "cluster": cluster, "gpu_type": gpu_type, "machines": [[machine, 1]]}]
            session.add(
                Attempt(
                    workload=workload, attempt=number, region="r", plan={"jobs": jobs}, gpu_types={},
                    cpus_milli=0, released_at=ended_at,
                )
            )  # fmt: skip
            session.flush()
            session.add(
                Allocation(
                    workload=workload, attempt=number, machine=machine, slots=(1 << gpus) - 1, awaited=0,
                    cpus_milli=round(cores * 1000), awaited_cpus_milli=0, memory_bytes=0, awaited_memory_bytes=0,
                    held_at=begun_at, released_at=ended_at, stopped_at=ended_at,
                )
            )  # fmt: skip


def _expected(
    held: list[Held],
    prices: dict[str, list[tuple[datetime, dict[str, float], str]]],
    since: datetime,
    until: datetime,
) -> dict[tuple[Any, ...], list[float]]:
    """Returns hours, hours without a price, and US dollars, summed minute by minute.

    The keys are day, tenant, capacity kind and resource.
    """
    out: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for tenant, _, cluster, gpus, cores, begun_at, ended_at in held:
        at = max(begun_at, since)
        while at < min(ended_at, until):
            now = [("reserved", {})] + [(kind, p) for since_, p, kind in sorted(prices[cluster], key=lambda r: r[0])
                                        if since_ <= at]  # fmt: skip
            kind, priced = now[-1]
            for resource, many in (({"c1": "a", "c2": "b"}[cluster], gpus), ("cpu", cores)):
                if many:
                    sums = out[at.date(), tenant, kind, resource]
                    sums[0] += many / 60
                    sums[1] += 0 if resource in priced else many / 60
                    sums[2] += many / 60 * priced.get(resource, 0.0)
            at += timedelta(minutes=1)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_those_of_every_minute(database: Engine, seed: int) -> None:
    """Costs equal the sum over minutes across days and price changes, for any days, tenant and workload.

    So they do while ended attempts are added to the sums by day, and after the workloads are deleted.
    """
    chance = random.Random(seed)

    def moment(hours: int) -> datetime:
        return T0 + timedelta(minutes=chance.randrange(hours * 60))

    prices: dict[str, list[tuple[datetime, dict[str, float], str]]] = {
        cluster: [
            (moment(60), {r: chance.choice((0.0, 0.04, 2.5)) for r in chance.sample(("a", "b", "cpu"), 2)}, kind)
            for kind in chance.sample(["spot", "on_demand", "reserved"], chance.randrange(4))
        ]
        for cluster in ("c1", "c2")
    }
    held: list[Held] = []
    for number in range(12):
        begun_at = moment(48)
        ended_at = begun_at + timedelta(minutes=chance.randrange(1, 1500))
        who = chance.choice("tu")
        many = chance.choice((0, 1, 4)), chance.choice((0.0, 0.5, 8.0))
        held.append((who, f"w{number % 5}{who}", chance.choice(("c1", "c2")), *many, begun_at, ended_at))
    _write(database, held, prices)
    windows = [
        (T0.date(), T0.date() + timedelta(days=5), None),
        (T0.date() + timedelta(days=1), moment(60).date(), "t"),
    ]
    for counted in (0, 5, len(held) - 5, 0):
        with transaction(database) as session:
            assert count_ended(session, counted) == counted
            for first, last, tenant in windows:
                own = [h for h in held if tenant in (None, h[0])]
                begin, end = (datetime.combine(day, time(), UTC) for day in (first, last + timedelta(days=1)))
                wanted = _expected(own, prices, begin, end)
                found = {
                    (c.day, c.tenant, c.capacity.value, c.resource): [c.hours, c.unpriced_h, c.usd]
                    for c in costs(session, first, last, tenant)
                }
                assert found.keys() == wanted.keys()
                for key, sums in wanted.items():
                    assert found[key] == pytest.approx(sums, abs=1e-6), key
            of_one = costs_of(session, held[0][1])
            wanted = _expected([h for h in held if h[1] == held[0][1]], prices, T0, T0 + timedelta(days=9))
            assert sum(c.usd for c in of_one) == pytest.approx(sum(sums[2] for sums in wanted.values()))
    with transaction(database) as session:
        before = costs(session, *windows[0])
        session.execute(delete(Workload))
        assert costs(session, *windows[0]) == before


def test_a_running_attempt_counts_until_now_and_once(database: Engine) -> None:
    """What is held counts at each reading; at the end of its attempt it is added once, also if that is repeated."""
    now = datetime.now(UTC)
    begun_at = now - timedelta(hours=3)
    day = begun_at.date()
    _write(database, [("t", "w", "c1", 2, 0.0, begun_at, now)], {"c1": [(T0, {"a": 1.5}, "spot")], "c2": []})
    with transaction(database) as session:
        session.execute(text("delete from cost_pending"))
        session.execute(text("alter table allocation disable trigger user"))  # There is no machine.
        for table in ("allocation", "attempt"):
            session.execute(text(f"update {table} set released_at = null"))
    for ends, pending in ((False, 0), (True, 1)):
        with transaction(database) as session:
            if ends:
                session.execute(text("alter table allocation disable trigger user"))
                session.execute(text("update allocation set released_at = :now"), {"now": now})
                session.execute(text("alter table allocation enable trigger user"))
                for _ in range(2):
                    session.execute(text("update attempt set released_at = :now"), {"now": now})
            assert session.scalar(select(func.count()).select_from(CostPending)) == pending
            for _ in range(2):
                found = costs(session, day, day + timedelta(days=1))
                assert sum(cost.hours for cost in found) == pytest.approx(6.0, abs=0.1)
                assert sum(cost.usd for cost in found) == pytest.approx(9.0, abs=0.2)
                assert count_ended(session, 10) == pending
                pending = 0


def test_prices_are_kept_from_each_change_on(database: Engine) -> None:
    """The price history has one row without prices and then one for each change; unchanged values add no row."""
    with transaction(database) as session:
        session.add(Region(name="r", bucket_url="file:///x"))
        session.flush()
        session.add(Cluster(region="r", name="c", prices={"a": 2.0}))
    for change in ({"prices": {"a": 3.0}}, {"prices": {"a": 3.0}}, {"zone": "z"}, {"capacity": "spot"}):
        with transaction(database) as session:
            row = session.get_one(Cluster, ("r", "c"))
            for name, value in change.items():
                setattr(row, name, value)
    with transaction(database) as session:
        kept = select(ClusterPrice.prices, ClusterPrice.capacity).order_by(ClusterPrice.since)
        assert session.execute(kept).all() == [
            ({}, "reserved"), ({"a": 2.0}, "reserved"), ({"a": 3.0}, "reserved"), ({"a": 3.0}, "spot"),
        ]  # fmt: skip
        first = session.scalar(text("select min(since) = '-infinity' from cluster_price"))
        assert first is True


def test_a_cluster_that_comes_back_has_no_old_prices(database: Engine) -> None:
    """The prices of a deleted cluster stay in the history and do not apply to a new cluster of the same name."""
    with transaction(database) as session:
        session.add(Region(name="r", bucket_url="file:///x"))
        session.flush()
        session.add(Cluster(region="r", name="c", capacity="spot", prices={"a": 2.0}))
        session.flush()
        session.execute(text("delete from cluster"))
        session.add(Cluster(region="r", name="c"))
        session.flush()
        kept = select(ClusterPrice.prices, ClusterPrice.capacity).order_by(ClusterPrice.since)
        assert session.execute(kept).all() == [({}, "spot"), ({"a": 2.0}, "spot"), ({}, "reserved")]


def test_another_kind_of_capacity_is_refused(database: Engine) -> None:
    """The database accepts exactly the capacity kinds of the code."""
    assert {kind.value for kind in CapacityKind} == {"reserved", "on_demand", "spot", "voluntary"}
    with pytest.raises(IntegrityError, match="cluster_capacity"), transaction(database) as session:
        session.add(Region(name="r", bucket_url="file:///x"))
        session.flush()
        session.add(Cluster(region="r", name="c", capacity="stolen"))


def test_preemptions_are_counted_once_and_kept(database: Engine) -> None:
    """The totals are the same before and after attempts are added to the sums, and after workloads are deleted."""
    now = datetime.now(UTC)
    held = [("t", f"w{number}", "c1", 1, 0.0, now - timedelta(hours=1), now) for number in range(5)]
    _write(database, held, {"c1": [(T0, {"a": 1.0}, "spot")], "c2": []})
    with transaction(database) as session:
        session.execute(update(Attempt).values(lost_s=2.5))
        session.execute(update(Attempt).where(Attempt.attempt == 5).values(region="s", lost_s=None))
        evicted = Reason(ReasonCode.EVICTED, {}).to_json()
        session.execute(update(Attempt).where(Attempt.attempt.in_([1, 2, 5])).values(outcome=evicted))
    wanted = [("r", 2, 10.0), ("s", 1, 0.0)]
    for counted in (0, 2, 3, 0):
        with transaction(database) as session:
            assert count_ended(session, counted) == counted
            assert ended_totals(session) == wanted
    with transaction(database) as session:
        session.execute(delete(Workload))
        assert ended_totals(session) == wanted
