"""Rules of the catalogue that Postgres enforces: each table has one home with all partitions; partitions are fixed."""

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, TextClause, delete, event, select, text, update
from sqlalchemy.exc import IntegrityError

from infra.db.base import Base
from infra.db.catalogue import ready_replicas
from infra.db.models import Datacenter, Region
from infra.db.session import transaction
from infra.db.tables import Partition, Replica, ReplicaPartition, Table


def _partition(name: str, size_bytes: int = 10, **more: Any) -> Partition:
    return Partition(data_table="t", name=name, location=f"tables/t/{name}/", size_bytes=size_bytes, **more)


def _add(engine: Engine, *rows: Base) -> None:
    with transaction(engine) as session:
        for row in rows:
            session.add(row)
            session.flush()


@pytest.fixture
def house(database: Engine) -> Engine:
    """Two regions, and a table of two partitions with its home in `a` and a replica in `b`."""
    _add(database, *[Region(name=name, bucket_url=f"file:///{name}") for name in "ab"])
    _add(
        database,
        Table(name="t", home_region="a"),
        Replica(data_table="t", region="a", state="ready"),
        _partition("1"),
        _partition("2"),
        Replica(data_table="t", region="b", state="ready"),
    )
    return database


def _held(engine: Engine, region: str) -> list[str]:
    with transaction(engine) as session:
        held = ReplicaPartition.region == region, ReplicaPartition.ready_at.is_not(None)
        return sorted(session.scalars(select(ReplicaPartition.partition).where(*held)))


def test_replicas_have_what_they_were_made_of(house: Engine) -> None:
    """A replica gets all partitions, whether it was created before or after them; the table has their total size."""
    assert _held(house, "a") == _held(house, "b") == ["1", "2"]
    with transaction(house) as session:
        row = session.get_one(Table, "t")
        assert (row.size_bytes, row.namespace) == (20, "default")


def test_what_is_appended_is_at_home_and_nowhere_else(house: Engine) -> None:
    """A new partition is in the home immediately; a replica is stale until it has the partition too."""
    _add(house, _partition("3", 5), _partition("4"))
    assert (_held(house, "a"), _held(house, "b")) == (["1", "2", "3", "4"], ["1", "2"])
    with transaction(house) as session:
        assert session.get_one(Table, "t").size_bytes == 35
        assert ready_replicas(session, ["t"]) == {"t": {"a": None, "b": _appended(house, "3")}}
    for name in "34":
        _has(house, name)
    with transaction(house) as session:
        assert ready_replicas(session, ["t"]) == {"t": {"a": None, "b": None}}


def _has(engine: Engine, partition: str, region: str = "b") -> None:
    _add(engine, ReplicaPartition(data_table="t", partition=partition, region=region, ready_at=datetime.now(UTC)))


def _appended(engine: Engine, partition: str) -> datetime:
    with transaction(engine) as session:
        return session.get_one(Partition, ("t", partition)).created_at


def _stale(engine: Engine, region: str = "b") -> tuple[datetime | None, bool]:
    with transaction(engine) as session:
        row = session.get_one(Replica, ("t", region))
        return row.stale_since, row.topping_up


def test_staleness_is_that_of_the_earliest_that_is_lacking(house: Engine) -> None:
    """A replica is stale since the append of the earliest partition that it lacks.

    When it lacks none any more, `topping_up` is cleared.
    """
    for name in "34":
        _add(house, _partition(name))
    with transaction(house) as session:
        session.get_one(Replica, ("t", "b")).topping_up = True
    assert _stale(house) == (_appended(house, "3"), True)
    _has(house, "3")
    assert _stale(house) == (_appended(house, "4"), True)
    _has(house, "4")
    assert _stale(house) == (None, False)
    with transaction(house) as session:
        session.delete(session.get_one(ReplicaPartition, ("t", "3", "b")))
    assert _stale(house) == (_appended(house, "3"), False)
    with transaction(house) as session:
        session.get_one(ReplicaPartition, ("t", "1", "b")).ready_at = None
    assert _stale(house) == (_appended(house, "1"), False)


def test_which_replicas_can_be_stale(house: Engine) -> None:
    """A replica that will be deleted can be stale; one that is being copied, or has only some partitions, cannot."""
    _add(house, *[Region(name=name, bucket_url=f"file:///{name}") for name in "cd"])
    _add(
        house,
        Replica(data_table="t", region="c", state="copying"),
        Replica(data_table="t", region="d", state="ready", whole=False),
    )
    with transaction(house) as session:
        row = session.get_one(Replica, ("t", "b"))
        row.state, row.delete_at = "deleting", datetime.now(UTC)
    _add(house, _partition("3"))
    assert [_stale(house, region)[0] for region in "abcd"] == [None, _appended(house, "3"), None, None]
    with transaction(house) as session:
        session.get_one(Replica, ("t", "c")).state = "ready"
    assert (_stale(house, "c")[0], _held(house, "c")) == (None, ["1", "2", "3"])


def test_ready_replicas_know_since_when(house: Engine) -> None:
    """The database sets the time at which a replica first became complete, and never changes it."""
    with transaction(house) as session:
        first = session.get_one(Replica, ("t", "b")).ready_at
        assert first is not None
        row = session.get_one(Replica, ("t", "b"))
        row.state, row.delete_at = "deleting", datetime.now(UTC)
    with transaction(house) as session:
        row = session.get_one(Replica, ("t", "b"))
        row.state, row.delete_at = "ready", None
    with transaction(house) as session:
        assert session.get_one(Replica, ("t", "b")).ready_at == first


REFUSED = {
    "a partition that changes": update(Partition).where(Partition.name == "1").values(size_bytes=11),
    "a partition that goes": delete(Partition).where(Partition.name == "1"),
    "a table without a home": text("update data_table set home_region = null"),
    "a home without a replica": text("insert into data_table (name, home_region) values ('u', 'a')"),
    "a home that is deleted": delete(Replica).where(Replica.region == "a"),
    "a home that is not ready": update(Replica).where(Replica.region == "a").values(state="copying"),
    "a home on its way out": text("update replica set state = 'deleting', delete_at = now() where region = 'a'"),
    "a home of some partitions": update(Replica).where(Replica.region == "a").values(whole=False),
    "a home that lacks one": text(
        "update replica_partition set ready_at = null where region = 'a' and partition = '1'"
    ),
    "a home that loses one": delete(ReplicaPartition).where(ReplicaPartition.region == "a"),
    "a deletion without its time": update(Replica).where(Replica.region == "b").values(state="deleting"),
    "a replica that is stale while it is made": text(
        "update replica set state = 'copying', stale_since = now() where region = 'b'"
    ),
    "a top-up of what lacks nothing": update(Replica).where(Replica.region == "b").values(topping_up=True),
    "a replica in a state of its own": update(Replica).where(Replica.region == "b").values(state="lost"),
    "a checksum of another kind": text(
        "insert into data_partition values ('t', '9', 'tables/t/9/', 1, 'md5:d41d8cd98f00b204e9800998ecf8427e')"
    ),
    "a name with the default namespace": text("insert into data_table (name, home_region) values ('default.t', 'a')"),
    "a region of less than nothing": text("update region set storage_bytes = -1"),
    "a datacenter of another region": text("update replica_partition set datacenter = 'dc' where region = 'b'"),
}


@pytest.mark.parametrize("statement", REFUSED.values(), ids=REFUSED.keys())
def test_what_must_never_be_is_refused(house: Engine, statement: Any) -> None:
    """A transaction that would break a rule fails and leaves no change."""
    _add(house, Datacenter(region="a", name="dc"))
    before = _everything(house)
    with pytest.raises(IntegrityError), transaction(house) as session:
        session.execute(statement)
    assert _everything(house) == before


def _everything(engine: Engine) -> list[list[str]]:
    with transaction(engine) as session:
        names = ("data_table", "data_partition", "replica", "replica_partition")
        return [sorted(session.scalars(text(f"select r::text from {name} as r"))) for name in names]


def test_a_home_moves_to_where_all_of_the_table_is(house: Engine) -> None:
    """A table's home can move only to a region with all partitions; then the old home's replica may be deleted."""
    _add(house, _partition("3"))
    switch = update(Table).values(home_region="b")
    with pytest.raises(IntegrityError, match="its home b lacks partition 3"), transaction(house) as session:
        session.execute(switch)
    with transaction(house) as session:
        session.add(ReplicaPartition(data_table="t", partition="3", region="b", ready_at=datetime.now(UTC)))
        session.execute(switch)
    with transaction(house) as session:
        row = session.get_one(Replica, ("t", "a"))
        row.state, row.delete_at = "deleting", datetime.now(UTC) + timedelta(days=1)
    with transaction(house) as session:
        assert ready_replicas(session, ["t", "u"]) == {"t": {"b": None}, "u": {}}
        session.delete(session.get_one(Replica, ("t", "a")))
    _add(house, _partition("4"))
    assert _held(house, "b") == ["1", "2", "3", "4"]


def test_a_replica_of_parts_has_only_those(house: Engine) -> None:
    """A partial replica has only its own partitions and does not count as ready; a copy makes it whole."""
    _add(
        house,
        Region(name="c", bucket_url="file:///c"),
        Replica(data_table="t", region="c", state="copying", whole=False),
    )
    _add(house, ReplicaPartition(data_table="t", partition="2", region="c", ready_at=datetime.now(UTC)))
    with transaction(house) as session:
        session.get_one(Replica, ("t", "c")).state = "ready"
    with transaction(house) as session:
        assert ready_replicas(session, ["t"]) == {"t": {"a": None, "b": None}}
    assert _held(house, "c") == ["2"]
    with transaction(house) as session:
        row = session.get_one(Replica, ("t", "c"))
        row.whole, row.state = True, "copying"
    with transaction(house) as session:
        session.get_one(Replica, ("t", "c")).state = "ready"
    assert _held(house, "c") == ["1", "2"]


def test_a_table_takes_everything_with_it(house: Engine) -> None:
    """Deleting a table also deletes its home, replicas and partitions."""
    with transaction(house) as session:
        session.execute(delete(Table))
    assert _everything(house) == [[]] * 4


@pytest.fixture
def waits(house: Engine) -> Iterator[threading.Event]:
    """Yields an event that is set when the second transaction of a race is about to send a statement."""
    sent = threading.Event()

    def before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and "data_" in statement:
            sent.set()

    event.listen(house, "before_cursor_execute", before)
    yield sent
    event.remove(house, "before_cursor_execute", before)


def _until_blocked(house: Engine, thread: threading.Thread) -> None:
    """Waits until the second transaction is blocked by a lock, or has ended."""
    waiting = text(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    )
    while thread.is_alive():
        with transaction(house) as session:
            if session.scalar(waiting):
                return
        thread.join(0.05)


def _race(house: Engine, first: TextClause, follow: Callable[[], None], waits: threading.Event) -> None:
    """Executes the statement `first`, and commits it when the second transaction, `follow`, is blocked by its locks."""
    thread = threading.Thread(target=follow)
    with transaction(house) as session:
        session.execute(first)
        thread.start()
        assert waits.wait(20)
        _until_blocked(house, thread)
    thread.join(20)


@pytest.mark.parametrize("first", ["append", "record"])
def test_staleness_and_appends_have_one_order(house: Engine, waits: threading.Event, first: str) -> None:
    """When an append races with the arrival of the missing partitions, the later one sees the other: it is stale."""
    _add(house, _partition("3"))
    acts = {"append": text("insert into data_partition (data_table, name, location, size_bytes)"
                           " values ('t', '4', 'tables/t/4/', 1)"),
            "record": text("insert into replica_partition (data_table, partition, region, ready_at)"
                           " values ('t', '3', 'b', now())")}  # fmt: skip
    second = next(name for name in acts if name != first)

    def follow() -> None:
        with transaction(house) as session:
            session.execute(acts[second])

    _race(house, acts[first], follow, waits)
    assert _stale(house)[0] == _appended(house, "4")


@pytest.mark.parametrize("first", ["append", "switch"])
def test_appends_and_moves_have_one_order(house: Engine, waits: threading.Event, first: str) -> None:
    """When an append races with a move of the home, the later one sees the other: no home lacks a partition."""
    acts = {"append": text("insert into data_partition (data_table, name, location, size_bytes)"
                           " values ('t', '3', 'tables/t/3/', 1)"),
            "switch": text("update data_table set home_region = 'b'")}  # fmt: skip
    second = next(name for name in acts if name != first)
    failed: list[str] = []

    def follow() -> None:
        try:
            with transaction(house) as session:
                session.execute(acts[second])
        except IntegrityError as error:
            failed.append(str(error.orig).splitlines()[0])

    _race(house, acts[first], follow, waits)
    assert failed == (["table t: its home b lacks partition 3"] if first == "append" else [])
    assert _held(house, "a" if first == "append" else "b") == ["1", "2", "3"]
