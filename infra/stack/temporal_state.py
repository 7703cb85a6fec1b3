"""The embedded Temporal's database on the disk, as it is before the server starts."""

import contextlib
import sqlite3
from pathlib import Path

from infra.errors import StackError


def discard_unfinished(state: Path) -> None:
    """Removes the database `state` if the server was killed before it had made it whole, and so never used it.

    The server makes its tables where there is no file, and only there: it would never start on a part of them. Its last
    step is to register namespaces, so a database without any holds nothing.

    Raises:
        StackError: it is damaged, or no database; what to do. One that cannot be opened now is left to the server.
    """
    if not state.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(state.absolute().as_uri() + "?mode=ro", uri=True)) as connection:
            tables = connection.execute("select count(*) from sqlite_master where name = 'namespaces'").fetchone()
            if tables[0] and connection.execute("select 1 from namespaces limit 1").fetchone() is not None:
                return
    except sqlite3.OperationalError:
        return
    except sqlite3.DatabaseError as error:
        raise StackError(
            f"temporal: {state} is damaged: {error}; restore it from a backup, or move {state.name}* away: "
            "workflows are then started again from Postgres, and running tasks go on"
        ) from None
    for path in state.parent.glob(f"{state.name}*"):
        path.unlink(missing_ok=True)
