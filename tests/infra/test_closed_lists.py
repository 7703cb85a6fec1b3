"""Rules of the schema that the models do not express: closed lists are CHECKs, and released migrations are fixed."""

import hashlib
import re
from collections import defaultdict
from enum import StrEnum
from pathlib import Path

import pytest
from sqlalchemy import CheckConstraint, Engine, text
from sqlalchemy.exc import IntegrityError

from capacity.providers import Refusal
from domain.capacity import CapacityKind
from domain.phases import Phase
from infra.db import migrate
from infra.db.models import Workload
from infra.db.schema import SCHEMA
from infra.db.session import transaction
from infra.db.tenants import Tenant
from lifecycle.instances import InstancePhase

_MIGRATIONS = Path(migrate.__file__).parent / "migrations"
_SQL = {
    "0001_allocation_guard.sql": "447516e2bb2b38ab339c5adcf2dc308c559f859ebe3f20cdbc7d9fd6bdbff1b3",
    "0002_change_log.sql": "3dba729a823c572a00f0763f467686a50b65abce88c1f098cc1fa2bbe4744c99",
    "0003_award.sql": "04bbb5f7d17e593eca59b44510dcfb107fd0e08a016bde6c9a4810b56902005a",
    "0005_catalogue.sql": "7b4f1d50950cdbea2755dc5fda030ca8b18b01b52bfb447b97679f5230a9f468",
    "0006_staleness.sql": "688f0e390c3635a13c5f0d87b80b61f31f8b856ff24fb783a157060a26d1669c",
    "0021_award.sql": "99e95c7376ce0d52e03493df3e4e213fcd1d78b92813d3d64cfc07bea83994e9",
    "0022_services.sql": "f5ac419ae9da0e8b20510374b294f3716c0c7e80074b6dd11eb464a6b892d337",
}
"""SHA-256 of each file that a revision reads. A change needs a new revision with a new file."""


def test_sql_of_released_revisions_is_pinned() -> None:
    """Every `.sql` file of the revisions is unchanged since its release; a new file must be added to `_SQL`."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in _MIGRATIONS.glob("*.sql")}
    assert found.keys() == _SQL.keys(), "add the SHA-256 of the new file to _SQL"
    changed = [name for name in sorted(_SQL) if found[name] != _SQL[name]]
    assert changed == [], "released databases were migrated with these files: write a new revision instead"


def test_phases_in_the_database_are_those_of_the_code(database: Engine) -> None:
    """The CHECK of `workload.phase` lists exactly the phases of `domain.phases`."""
    with database.connect() as connection:
        definition = connection.execute(
            text("select pg_get_constraintdef(oid) from pg_constraint where conname = 'workload_phase'")
        ).scalar_one()
    assert set(re.findall(r"'(\w+)'", definition)) == {phase.value for phase in Phase}


@pytest.mark.parametrize(
    ("constraint", "listed"),
    [("instance_phase", InstancePhase), ("instance_kind", CapacityKind), ("launch_refusal_refusal", Refusal)],
)
def test_the_ledgers_lists_are_those_of_the_code(database: Engine, constraint: str, listed: type[StrEnum]) -> None:
    """The CHECKs of instance phases, capacity kinds and launch refusals list exactly the values of the code."""
    with database.connect() as connection:
        definition = connection.execute(
            text("select pg_get_constraintdef(oid) from pg_constraint where conname = :name"), {"name": constraint}
        ).scalar_one()
    assert set(re.findall(r"'(\w+)'", definition)) == {value.value for value in listed}


def test_another_phase_is_refused(database: Engine) -> None:
    """The database rejects a phase that is not in the list."""
    with transaction(database) as session:
        session.add(Tenant(name="t", level=3))
    with pytest.raises(IntegrityError, match="workload_phase"), transaction(database) as session:
        session.add(Workload(id="w", tenant="t", name="w", spec={}, phase="paused"))


_CLOSED = re.compile(r"(state|phase|kind|role|made_by|status)$")
_OPEN = {"event.kind", "outbox.kind", "change.kind", "service.state"}
"""Columns whose values grow with each release: the code names events and mail, triggers name changes. The state of a
service is a JSON object."""


def _checks(database: Engine) -> dict[str, list[str]]:
    """Returns the CHECK definitions of each table in the database."""
    with database.connect() as connection:
        rows = connection.execute(
            text(
                "select conrelid::regclass::text, pg_get_constraintdef(oid) from pg_constraint"
                " where contype = 'c' and connamespace = 'public'::regnamespace"
            )
        ).all()
    found: dict[str, list[str]] = defaultdict(list)
    for table, definition in rows:
        found[table].append(definition)
    return found


def test_every_check_of_the_models_is_in_the_database(database: Engine) -> None:
    """Each table has as many CHECKs in the database as in the models; Alembic's autogenerate does not compare them."""
    found = _checks(database)
    for name, table in SCHEMA.tables.items():
        declared = {*table.constraints, *(c for column in table.columns for c in column.constraints)}
        wanted = [str(c.sqltext) for c in declared if isinstance(c, CheckConstraint)]
        assert len(found[name]) == len(wanted), f"{name}: {found[name]} in the database, {wanted} in the models"


def test_every_column_with_a_closed_list_has_a_check(database: Engine) -> None:
    """Text columns with names like state, phase, kind or role list their values in a CHECK."""
    found = _checks(database)
    for table in SCHEMA.tables.values():
        for column in table.columns:
            if not _CLOSED.search(column.name) or f"{table.name}.{column.name}" in _OPEN:
                continue
            own = [check for check in found[table.name] if re.search(rf"\b{column.name}\b", check)]
            assert any("ANY (ARRAY[" in check for check in own), f"{table.name}.{column.name} has no CHECK"
