"""Publishes how the rounds of periodic loops end, so that a loop that fails each time is visible to operators."""

import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from infra.db.rounds import note_round, note_start
from infra.db.session import in_thread, transaction

_log = logging.getLogger(__name__)
_FRESH_S = 60.0
"""The interval at which repeated success is published."""
HOUSEKEEPING_LATE_S = 3600.0
"""The time after which housekeeping is late if no round has succeeded. A round may take a quarter of an hour."""


class RoundLog:
    """Publishes the outcomes of one loop."""

    def __init__(self, engine: Engine, loop: str, late_s: float | None) -> None:
        """`late_s`: `infra.db.rounds.LoopState.late_s`."""
        self._engine, self._loop, self._late_s = engine, loop, late_s
        self._succeeded_s: float | None = None
        """When the last published success was, on the monotonic clock; None: the last round failed."""
        self._has_begun = False

    def began(self) -> None:
        """Publishes the beginning of the loop's first round. Blocks."""
        if not self._has_begun:
            self._has_begun = True
            try:
                with transaction(self._engine) as session:
                    note_start(session, self._loop, self._late_s)
            except SQLAlchemyError as error:
                self._has_begun = False
                _log.warning("the start of the loop '%s' is not published: %s", self._loop, error)

    def ended(self, failures: Sequence[str]) -> None:
        """Publishes the end of a round. `failures` are the messages of the parts that failed. Blocks.

        If Postgres does not answer, nothing is published.
        """
        now_s = time.monotonic()
        if not failures and self._succeeded_s is not None and now_s - self._succeeded_s < _FRESH_S:
            return
        self._succeeded_s = None if failures else now_s
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        try:
            with transaction(self._engine) as session:
                note_round(session, self._loop, self._late_s, failures[0] + more if failures else None)
        except SQLAlchemyError as error:
            self._succeeded_s = None
            _log.warning("the state of the loop '%s' is not published: %s", self._loop, error)

    @contextmanager
    def one(self) -> Iterator[list[str]]:
        """Publishes the end of the round that runs in the block. The block adds the messages of the parts that fail."""
        failures: list[str] = []
        self.began()
        try:
            yield failures
        except Exception as error:
            self.ended([_said(error)])
            raise
        self.ended(failures)

    @asynccontextmanager
    async def one_async(self) -> AsyncIterator[list[str]]:
        """The same as `one` for a block on an event loop."""
        failures: list[str] = []
        await in_thread(self.began)
        try:
            yield failures
        except Exception as error:
            await in_thread(self.ended, [_said(error)])
            raise
        await in_thread(self.ended, failures)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
