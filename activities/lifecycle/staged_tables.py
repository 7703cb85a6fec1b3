"""The tables that an attempt reads: which are stale in its region, and which are wrong there."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session
from temporalio.exceptions import ApplicationError

from infra.db.catalogue import ready_replicas
from infra.db.tables import Replica


def stale_tables(session: Session, tables: Collection[str], region: str) -> dict[str, datetime]:
    """Returns those of the tables whose replica in the region is stale, each with the time since when."""
    replicas = ready_replicas(session, tables)
    since = ((table, replicas[table].get(region)) for table in tables)
    return {table: at for table, at in since if at is not None}


def refuse_wrong(session: Session, tables: Collection[str], region: str) -> None:
    """Fails while a replica that the workload reads is being repaired, so that staging is retried until then.

    Raises:
        ApplicationError: a replica of a table in the region is known to be wrong.
    """
    wrong = Replica.data_table.in_(tables), Replica.region == region, Replica.wrong_since.is_not(None)
    table = session.scalar(select(Replica.data_table).where(*wrong).order_by(Replica.data_table).limit(1))
    if table is not None:
        message = f"the replica of table {table} in {region} was found wrong and is being repaired"
        raise ApplicationError(message, type="WrongReplica")
