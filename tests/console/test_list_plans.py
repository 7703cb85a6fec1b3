"""Postgres can answer each list as a range of an index, in its order, and the map of the past without a scan."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, Select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.event import listen
from sqlalchemy.orm import Session

from api.auth import Caller, Role
from api.fleet import slots
from api.workloads.selection import Filters, newest
from bench.console_rows import ConsoleRows, fill
from infra.db.lost_work import preempted_since
from infra.db.session import open_engine
from tests.databases import Databases

_OPERATOR = Caller("key", Role.OPERATOR, None, "")
_VISION = Caller("key", Role.VIEWER, "vision", "")
_LARGE = {"workload", "attempt", "allocation", "event"}


@pytest.fixture(scope="module")
def filled(databases: Databases) -> Iterator[Engine]:
    with databases.taken() as url:
        engine = open_engine(url)
        fill(engine, ConsoleRows(machines=60, waiting=300, finished=6000))
        yield engine
        engine.dispose()


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", []) for node in _nodes(child))]


def _explained(connection: Connection, statement: str, given: Any) -> list[dict[str, Any]]:
    found = connection.exec_driver_sql(f"explain (analyze, format json) {statement}", given).scalar_one()
    return _nodes(found[0]["Plan"])


def _compiled(statement: Select[Any]) -> tuple[str, Any]:
    compiled = statement.compile(dialect=postgresql.psycopg.dialect(), compile_kwargs={"render_postcompile": True})
    return str(compiled), compiled.params


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("caller", "filters", "index"),
    [
        (_OPERATOR, {}, "workload_pkey"),
        (_OPERATOR, {"phase": ["failed"]}, "workload_ended"),
        (_OPERATOR, {"phase": ["running"]}, "workload_placed"),
        (_OPERATOR, {"phase": ["held"]}, "workload_paused"),
        (_OPERATOR, {"name": "bert-1"}, "workload_name"),
        (_OPERATOR, {"phase": ["live"], "tenant": "vision"}, "workload_live_tenant"),
        (_VISION, {}, "workload_tenant"),
        (_VISION, {"phase": ["live"]}, "workload_live_tenant"),
        (_VISION, {"phase": ["failed"]}, "workload_ended_tenant"),
    ],
)
@pytest.mark.parametrize("before", [None, "wl-0000000000003000"])
def test_a_list_is_a_range_of_an_index(
    filled: Engine, caller: Caller, filters: dict[str, Any], index: str, before: str | None
) -> None:
    """It reads hardly more rows than it returns, from the index whose order it has, and sorts nothing."""
    statement, given = _compiled(newest(caller, Filters(**filters), before=before, most=51)[0])
    with filled.connect() as connection:
        # The table is small, so that Postgres would rather read all of it.
        for method in ("seqscan", "bitmapscan", "sort"):
            connection.exec_driver_sql(f"set enable_{method} = off")
        nodes = _explained(connection, statement, given)
    assert [node["Index Name"] for node in nodes if "Index Name" in node] == [index]
    assert not [node for node in nodes if "Sort" in node["Node Type"]]
    assert sum(node.get("Rows Removed by Filter", 0) for node in nodes) <= 60


def test_the_work_lost_today_is_a_range_of_an_index(filled: Engine) -> None:
    """It reads the attempts that were preempted, and not all that have ended."""
    asked: list[tuple[str, Any]] = []
    with filled.connect() as connection:
        for method in ("seqscan", "bitmapscan"):
            connection.exec_driver_sql(f"set enable_{method} = off")
        listen(
            connection, "before_cursor_execute", lambda _c, _u, statement, given, *_: asked.append((statement, given))
        )
        preempted_since(Session(connection), datetime.now(UTC) - timedelta(days=30), None, 5)
        nodes = _explained(connection, *asked[0])
    (read,) = [node for node in nodes if node.get("Relation Name") == "attempt"]
    assert read["Index Name"] == "attempt_preempted"
    assert read.get("Rows Removed by Filter", 0) == 0 and read["Actual Rows"] > 0


def test_the_past_is_read_by_indexes(filled: Engine) -> None:
    at = datetime.now(UTC) - timedelta(days=2)
    given = {"region": "east", "tenants": ["vision"], "tenant": None, "at": at, "begin": at, "end": at, "limit": 50}
    with filled.connect() as connection:
        connection.exec_driver_sql("set enable_seqscan = off")
        for statement in (slots._PAST, slots._MOVES):
            compiled = statement.compile(dialect=postgresql.psycopg.dialect())
            wanted = {name: given[name] for name in compiled.params}
            nodes = _nodes(
                connection.execute(text(f"explain (format json) {statement.text}"), wanted).scalar_one()[0]["Plan"]
            )
            assert any(node.get("Index Name") == "allocation_held" for node in nodes)
            scanned = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
            assert not scanned & _LARGE
