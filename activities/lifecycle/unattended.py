"""Finds rows that should have a running workflow and have none.

Either Temporal has lost its state, or the outbox messages that start them could not be delivered and were set aside.
Listings of workflows lag, so a row counts only if it has disagreed with the listing for some time (`Suspects`).
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from sqlalchemy import Engine, Select
from temporalio.client import Client

from infra.db.session import in_db


@dataclass
class _Suspicion:
    """A disagreement, since when it is unchanged, and whether outbox messages were redelivered because of it."""

    what: Hashable
    since_s: float
    """On the monotonic clock."""
    redelivered: bool = False


class Suspects:
    """The current disagreements. A changed disagreement starts its time again; one that a round misses is removed."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._found: dict[str, _Suspicion] = {}

    def due(self, disagree: dict[str, Hashable]) -> list[str]:
        """Replaces the disagreements by the current ones, by name; returns those unchanged for `patience_s` seconds."""
        now_s = self._clock()
        kept = {}
        for name, what in disagree.items():
            before = self._found.get(name)
            kept[name] = before if before is not None and before.what == what else _Suspicion(what, now_s)
        self._found = kept
        return sorted(name for name, s in kept.items() if now_s - s.since_s >= self._patience_s)

    def was_told_again(self, name: str) -> bool:
        """Returns whether outbox messages were redelivered because of a disagreement."""
        return self._found[name].redelivered

    def redelivered(self, name: str) -> None:
        """Records that outbox messages were redelivered because of a disagreement, and restarts its time."""
        self._found[name].redelivered, self._found[name].since_s = True, self._clock()

    def clear(self, name: str) -> None:
        """Forgets the disagreement of a workflow and its row, after it was handled."""
        self._found.pop(name, None)


class Unattended:
    """The live rows of one kind that have no workflow. Each row has a workflow of its own."""

    def __init__(
        self,
        engine: Engine,
        client: Client,
        workflow_type: str,
        workflow_id: Callable[[str], str],
        live_ids: Select[str],
        patience_s: float,
    ) -> None:
        """`live_ids` selects the ids of the live rows. A row counts once it has had no workflow for `patience_s`."""
        self._engine = engine
        self._client = client
        self._running = f"WorkflowType = '{workflow_type}' AND ExecutionStatus = 'Running'"
        self._workflow_id = workflow_id
        self._live_ids = live_ids
        self._suspects = Suspects(patience_s)

    async def find(self) -> list[str]:
        """Returns the ids of the live rows that have had no workflow since an earlier call. It usually only counts."""
        live = await in_db(self._engine, lambda session: session.scalars(self._live_ids).all())
        if not live or (await self._client.count_workflows(self._running)).count >= len(live):
            self._suspects.due({})
            return []
        running = {execution.id async for execution in self._client.list_workflows(self._running)}
        gone: dict[str, Hashable] = {one: None for one in live if self._workflow_id(one) not in running}
        due = self._suspects.due(gone)
        for one in due:
            self._suspects.clear(one)
        return due
