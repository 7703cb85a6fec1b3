"""The schema: databases of other versions are refused, and the allocation guard rejects invalid allocations."""

import itertools
import random
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from infra.db import migrate
from infra.db.models import Allocation, Attempt, Cluster, Machine, Region, Workload
from infra.db.schema import SCHEMA
from infra.db.session import open_engine, transaction
from infra.db.tenants import Tenant
from infra.errors import ConfigurationError
from tests.databases import Databases

_CATALOGUE = text("select oid, xmin::text, relname from pg_class where oid >= 16384 order by oid")
"""Every table, index and sequence of a database, with the transaction that last changed its definition."""


def test_models_and_database_agree(database: Engine) -> None:
    """Alembic's autogenerate finds no difference between the models and a database that `upgrade` has prepared."""
    with database.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), SCHEMA) == []


def test_head_is_alembics_head(database: Engine) -> None:
    """`migrate.head` equals Alembic's head revision, and a new database is at it."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrate.__file__).parent / "migrations"))
    assert migrate.head() == ScriptDirectory.from_config(config).get_current_head() == migrate.current(database)


@pytest.mark.parametrize("revision", ["0043", "9999"])
def test_a_database_of_another_version_is_refused(databases: Databases, revision: str) -> None:
    """A revision from before 0.2.0 or of a newer version is an error that names it; the database does not change."""
    with databases.taken() as url:
        engine = open_engine(url)
        with engine.begin() as connection:
            connection.execute(text("update alembic_version set version_num = :revision"), {"revision": revision})
            connection.execute(text("create table kept as select 7 as value"))
        with engine.connect() as connection:
            before = connection.execute(_CATALOGUE).all()
        with pytest.raises(ConfigurationError, match=rf"revision {revision}, .* left unchanged"):
            migrate.upgrade(engine)
        with engine.connect() as connection:
            assert connection.execute(_CATALOGUE).all() == before
            assert connection.execute(text("select value from kept")).scalar_one() == 7
            assert migrate.current(engine) == revision
        engine.dispose()


def test_a_table_of_another_program_is_not_taken_over(databases: Databases) -> None:
    """In a database that already has a table with the name of one of mizzen's, nothing is created."""
    url = databases.create("template0")
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text("create table machine (id text)"))
    with pytest.raises(ProgrammingError, match='relation "machine" already exists'):
        migrate.upgrade(engine)
    with engine.connect() as connection:
        tables = connection.execute(text("select tablename from pg_tables where schemaname = 'public'")).scalars().all()
    assert tables == ["machine"]
    engine.dispose()
    databases.drop(url)


@pytest.fixture
def machine(database: Engine) -> Engine:
    """Creates a database with one machine of four slots and ten workloads with one live attempt each."""
    with transaction(database) as session:
        session.add(Tenant(name="t", level=3))
        session.add(Region(name="r", bucket_url="file:///nowhere"))
        session.flush()
        session.add(Cluster(region="r", name="c"))
        session.flush()
        session.add(
            Machine(
                id="r/c/m", region="r", cluster="c", rack="k", gpu_type="a100", gpus=4, cpus_milli=8000,
                memory_bytes=1 << 30, free_cpus_milli=8000, free_memory_bytes=1 << 30, state="ready",
                incarnation="i", public_key="", address="127.0.0.1",
            )
        )  # fmt: skip
        for i in range(10):
            session.add(Workload(id=f"w{i}", tenant="t", name=f"w{i}", spec={}))
        session.flush()
        for i in range(10):
            session.add(Attempt(workload=f"w{i}", attempt=1, region="r", plan={}, gpu_types={}, cpus_milli=0))
    return database


def _allocation(workload: int, slots: int, awaited: int = 0, cpus: int = 0, awaited_cpus: int = 0) -> Allocation:
    return Allocation(
        workload=f"w{workload}", attempt=1, machine="r/c/m", slots=slots, awaited=awaited, cpus_milli=cpus,
        awaited_cpus_milli=awaited_cpus, memory_bytes=0, awaited_memory_bytes=0,
    )  # fmt: skip


def _refused(engine: Engine, allocation: Allocation) -> bool:
    try:
        with transaction(engine) as session:
            session.add(allocation)
    except IntegrityError:
        return True
    return False


def test_slot_has_one_holder(machine: Engine) -> None:
    """The database rejects a second allocation of a held slot without any change."""
    assert not _refused(machine, _allocation(0, 0b0011))
    assert _refused(machine, _allocation(1, 0b0110))
    assert not _refused(machine, _allocation(2, 0b1100))
    with transaction(machine) as session:
        assert session.get_one(Machine, "r/c/m").held == 0b1111


def test_slot_has_one_successor_and_only_held_slots_have_one(machine: Engine) -> None:
    """A slot can be awaited by one allocation only, and only while another allocation holds it."""
    assert not _refused(machine, _allocation(0, 0b0011))
    assert _refused(machine, _allocation(1, 0, awaited=0b0100))
    assert not _refused(machine, _allocation(2, 0, awaited=0b0001))
    assert _refused(machine, _allocation(3, 0, awaited=0b0001))


def test_cpus_and_slots_stay_within_the_machine(machine: Engine) -> None:
    """No more CPUs and slots than the machine has can be held; awaited CPUs do not count yet."""
    assert _refused(machine, _allocation(0, 1 << 4))
    assert not _refused(machine, _allocation(1, 0, cpus=8000))
    assert _refused(machine, _allocation(2, 0, cpus=1))
    assert not _refused(machine, _allocation(3, 0, cpus=1, awaited_cpus=1))


def test_masks_equal_the_allocations_after_any_sequence(machine: Engine) -> None:
    """After random inserts, hand-overs and releases, the machine's masks are the union of the live allocations."""
    chance = random.Random(7)
    for step, i in itertools.product(range(6), range(10)):
        try:
            with transaction(machine) as session:
                row = session.get(Allocation, (f"w{i}", 1, "r/c/m"))
                if row is None:
                    session.add(
                        _allocation(i, chance.randrange(16) & chance.randrange(16), cpus=chance.randrange(3000))
                    )
                elif row.released_at is None and chance.random() < 0.5:
                    session.execute(
                        text("update allocation set released_at = now() where workload = :w"), {"w": row.workload}
                    )
                else:
                    row.slots = chance.randrange(16)
        except IntegrityError:
            assert step >= 0
        with transaction(machine) as session:
            live = session.scalars(select(Allocation).where(Allocation.released_at.is_(None))).all()
            found = session.get_one(Machine, "r/c/m")
            assert found.held == sum(a.slots for a in live) == _union(a.slots for a in live)
            assert found.free_cpus_milli == 8000 - sum(a.cpus_milli for a in live) >= 0


def _union(masks: "itertools.chain[int] | object") -> int:
    out = 0
    for mask in masks:  # type: ignore[attr-defined]
        out |= mask
    return out
