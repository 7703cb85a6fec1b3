"""Checks the database file of the embedded Temporal server before the server starts."""

import contextlib
import sqlite3
from pathlib import Path

from infra.errors import StackError


def discard_unfinished(state: Path) -> None:
    """Removes the database file `state` if the server was killed while it created the database.

    The server creates its tables only if there is no file, so it cannot start with an incomplete database. Registering
    namespaces is the last step of the creation, so a database without namespaces contains no data. A file that cannot
    be opened at the moment is left unchanged.

    Raises:
        StackError: the file is damaged or not a database. The message says what to do.
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
            "workflows are then recreated from Postgres, and running tasks continue"
        ) from None
    for path in state.parent.glob(f"{state.name}*"):
        path.unlink(missing_ok=True)
