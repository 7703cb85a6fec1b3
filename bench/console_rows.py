"""Rows of a large installation for the console: machines, workloads that run, wait and have ended, and their history.

They are written by SQL, as the control plane would leave them; triggers that check allocations are off meanwhile.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, text

from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode
from infra.db import published_queue
from infra.db.costs import count_ended
from infra.db.lent_machines import count_given
from infra.db.session import transaction

TENANTS = {"vision": 2, "language": 3, "speech": 4, "robotics": 5, "climate": 6}
"""Level of each tenant."""
_TABLES = "tenant", "region", "cluster", "machine", "workload", "attempt", "allocation", "event", "waiting"
_COUNTED_AT_ONCE = 50_000
_REGIONS = ("east", "north", "west")
_SECTIONS = dict(
    section.split("\n", 1) for section in (Path(__file__).parent / "console_rows.sql").read_text().split("\n-- ")[1:]
)
"""The statements of each section, by its name."""
_REASONS: dict[str, Any] = {
    "why": [
        Reason(
            ReasonCode.INSUFFICIENT_CAPACITY,
            {"region": region, "placeable": 1, "tasks": 2, "job": "trainer", "evictable": 0},
        ).to_json()
        for region in _REGIONS
    ],
    "cordon": Reason(
        ReasonCode.CORDONED_BY_OPERATOR, {"by": "key-operator", "note": "fan replaced on Friday"}
    ).to_json(),
    "failed": Reason(ReasonCode.TASK_FAILED, {"task": "trainer/0", "status": "exit code 1"}).to_json(),
    "preempted": Reason(ReasonCode.PREEMPTED_BY_OPERATOR, {"by": "key-operator"}).to_json(),
}


@dataclass(frozen=True)
class ConsoleRows:
    """Numbers of rows."""

    machines: int = 10_000
    waiting: int = 100_000
    finished: int = 1_000_000
    days: float = 30.0
    """Days over which the finished workloads are spread."""


def fill(engine: Engine, rows: ConsoleRows) -> None:
    """Adds the rows to an empty, migrated database, and publishes a queue."""
    running = rows.machines * 9 // 10
    with engine.begin() as connection:
        for table in _TABLES:
            connection.execute(text(f"alter table {table} disable trigger user"))
        _run(connection, ("places",), rows, 0, 0)
        _run(connection, ("named", "ended"), rows, 0, rows.finished)
        _run(connection, ("named", "running"), rows, rows.finished, running)
        _run(connection, ("named", "waiting"), rows, rows.finished + running, rows.waiting)
        connection.execute(
            text("insert into cluster_price select region, name, '-infinity', capacity, prices from cluster")
        )
        for table in _TABLES:
            connection.execute(text(f"alter table {table} enable trigger user"))
    with transaction(engine) as session:
        # As the trigger and housekeeping do.
        session.execute(
            text("insert into cost_pending select workload, attempt from attempt where released_at < now()")
        )
        session.execute(
            text(
                "insert into given_pending select workload, attempt, machine, l.released_at from attempt as a"
                " join allocation as l using (workload, attempt)"
                " where a.launch_limit_s is not null and l.released_at is not null"
            )
        )
        for count in (count_ended, count_given):
            while count(session, _COUNTED_AT_ONCE):
                pass
        published_queue.publish(session, _queue(rows, rows.finished + running), {"scans": 1})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("vacuum analyze"))


def add_replicas(engine: Engine, rows: ConsoleRows, service: str, count: int) -> None:
    """Adds replicas and the requests of an hour to a service."""
    with engine.begin() as connection:
        _run(connection, ("replicas",), rows, rows.finished, count, service=service)


def add_wide_region(engine: Engine, rows: ConsoleRows) -> None:
    """Adds the region `wide`, with a copy of every machine and of what it holds."""
    with engine.begin() as connection:
        for table in _TABLES:
            connection.execute(text(f"alter table {table} disable trigger user"))
        _run(connection, ("wide",), rows, 0, 0)
        for table in _TABLES:
            connection.execute(text(f"alter table {table} enable trigger user"))


def _run(
    connection: Connection, sections: Iterable[str], rows: ConsoleRows, first: int, count: int, service: str = ""
) -> None:
    given: dict[str, Any] = {
        "service": service,
        "machines": rows.machines, "days": rows.days, "first": first, "count": count, "names": list(TENANTS),
        "regions": list(_REGIONS), "tenants": json.dumps(TENANTS),
        **{name: json.dumps(reason) for name, reason in _REASONS.items()},
    }  # fmt: skip
    for statement in ";\n".join(_SECTIONS[section] for section in sections).split(";\n"):
        if statement.strip():
            used = {name: value for name, value in given.items() if f":{name}" in statement}
            connection.execute(text(statement), used)


def _queue(rows: ConsoleRows, first: int) -> published_queue.PublishedQueue:
    count = rows.waiting
    numbers = np.arange(count)
    order = np.lexsort((numbers, numbers % len(TENANTS)))
    ids = np.array([f"wl-{first + n:016d}" for n in order.tolist()], "S")
    tenant = (order % len(TENANTS)).astype(np.int32)
    levels = np.array(list(TENANTS.values()), np.int8)[tenant]
    quotas = [published_queue.PublishedQuota(name, {"h100": rows.machines}, None) for name in TENANTS]
    starts = np.repeat(np.arange(count, dtype=np.float32), 2) * 20 + np.tile(np.array([60, 600], np.float32), count)
    assert levels.max(initial=0) < OVER_QUOTA_RANK
    empty = np.empty(0, np.int64)
    credit = np.round(np.linspace(2, 0, count), 3)
    return published_queue.PublishedQueue(
        1, time.time(), quotas, ["h100"], ids, levels, credit, np.zeros(count), tenant, empty.astype(np.int16),
        empty, empty, starts,
    )  # fmt: skip
