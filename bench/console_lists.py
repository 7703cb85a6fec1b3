"""console: the queries of lists beside a plain read of the rows that the page shows, by their keys.

Counts are not among them; they end at 10,000 rows. Both are executed by Postgres alone, with what they need in its
memory, and include that the rows are read and sent (`serialize`); the best of several rounds counts.
"""

import re
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Engine

_ROUNDS = 7
_TABLES = {"queue": "workload", "workloads": "workload", "fleet/east": "machine", "lending": "machine"}
_ROW = re.compile(r'<tr id="([^"]+)"')


def table_of(path: str) -> str | None:
    """Returns the table whose rows the list of a page shows; None: the page has no long list."""
    return _TABLES.get(path.partition("?")[0].strip("/"))


def ratio(engine: Engine, table: str, body: str, statements: Iterable[tuple[str, Any]]) -> tuple[float, str]:
    """Returns the time of the dearest list query of a page, as a multiple of a plain read, and its statement.

    Args:
        engine: the database.
        table: the table of the rows.
        body: the page.
        statements: the statements for the page, with their parameters.
    """
    ids = _ROW.findall(body)
    with engine.connect() as connection:
        plain_ms = _best(connection, f"select * from {table} where id = any(%(ids)s)", {"ids": ids})
        lists = [one for one in statements if "LIMIT " in one[0].upper() and not one[0].startswith("SELECT count(*)")]
        times = [(_best(connection, statement, given) / plain_ms, statement) for statement, given in lists]
    return max(times, default=(0.0, ""))


def _best(connection: Connection, statement: str, given: Any) -> float:
    """Returns the shortest execution time in ms."""
    explain = f"explain (analyze, timing off, serialize text, format json) {statement}"
    return min(
        float(connection.exec_driver_sql(explain, given).scalar_one()[0]["Execution Time"]) for _ in range(_ROUNDS)
    )
