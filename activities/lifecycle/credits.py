"""Finds the checkpoints of work on lent machines in the stores: they are the evidence by which its time counts."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Engine, func, select, text

from activities.leader import Leader, lead
from domain import ids
from domain.lifecycle.credit import EVIDENCE_S, Earned
from infra.config.settings import Settings
from infra.db.models import Attempt
from infra.db.session import in_db, in_thread, transaction
from mizzen.checkpoint import list_committed

_ROUNDS = 6
"""Progress is read this many times as often: the evidence is for accounts, and a look reads the whole log."""
_DUE = text(
    "select a.workload, a.attempt, coalesce(a.store_url, r.bucket_url) as url"
    " from attempt as a join region as r on r.name = a.region where a.launch_limit_s is not null"
    " and a.checkpoint_step is not null"
    " and (a.released_at is null or a.released_at > now() - make_interval(secs => :evidence_s))"
    " and (a.earned -> 'checkpoint' ->> 0)::numeric is distinct from a.checkpoint_step order by random() limit 50"
)
"""Attempts on lent machines that report a checkpoint which was not found yet."""


@dataclass(frozen=True)
class _Due:
    workload: str
    attempt: int
    url: str


class Credits:
    """Looks for the checkpoints in rounds. In an installation, one process runs them; the others are on standby."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._interval_s = _ROUNDS * settings.lifecycle.collect_interval_s

    async def run(self) -> None:
        """Runs rounds until cancelled, while this process is the leader."""
        await lead(self._engine, Leader.CREDITS, "credits", self.round, self._interval_s)

    async def round(self) -> None:
        """Looks once for each checkpoint that was not found yet. An error of one store does not delay the others."""
        failed: Exception | None = None
        for row in await in_db(self._engine, lambda session: session.execute(_DUE, {"evidence_s": EVIDENCE_S}).all()):
            try:
                await in_thread(self._inspect, _Due(*row))
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def _inspect(self, due: _Due) -> None:
        found = list_committed(f"{due.url.rstrip('/')}/{ids.checkpoint_prefix(due.workload)}")
        newest = next((one for one in found if one.attempt == due.attempt), None)
        if newest is None:
            return
        with transaction(self._engine) as session:
            row = session.get(Attempt, (due.workload, due.attempt), with_for_update=True)
            now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
            # Later the hours of the attempt are in the sums of its machines (`infra.db.lent_machines`).
            if row is not None and (row.released_at is None or row.released_at > now - timedelta(seconds=EVIDENCE_S)):
                # The time is from the record, which the task wrote.
                at_s = min(newest.created_at_s, now.timestamp())
                row.earned = Earned.of(row.earned).with_checkpoint(newest.step, at_s).to_json()
