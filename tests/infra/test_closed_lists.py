"""Rules of the schema that the models do not express: closed lists are CHECKs."""

import re
from collections import defaultdict
from enum import StrEnum

import pytest
from sqlalchemy import CheckConstraint, Engine, text
from sqlalchemy.exc import IntegrityError

from capacity.provider import Refusal
from domain.capacity import CapacityKind
from domain.lifecycle.instances import InstancePhase
from domain.phases import Phase
from infra.db.models import Workload
from infra.db.schema import SCHEMA
from infra.db.session import transaction
from infra.db.tenants import Tenant


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
"""Columns whose values grow with each release: the code names events and messages, triggers name changes. The state of
a service is a JSON object."""


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
