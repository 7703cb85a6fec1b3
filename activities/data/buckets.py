"""Periodic checks of a region's bucket. A region whose bucket does not answer gets no work until it does.

The first check writes a small marker object into the bucket. Later checks read it. So a check fails if the bucket was
removed, emptied or replaced, if its folder is not mounted, or if the store refuses requests or hangs. A new folder that
another process creates in place of a missing mount also fails, because it lacks the marker.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from domain import ids
from gms.auction.silence import ProbeBackoff
from infra.config.scheduling import BucketSettings
from infra.db.buckets import BucketState, bucket_states, publish_bucket
from infra.db.models import Region
from infra.db.session import transaction
from mizzen.objects.store import MissingObject, ObjectStore
from mizzen.objects.urls import open_store

_log = logging.getLogger(__name__)
_MARKER = (
    b"mizzen reads this object to see that the bucket answers; see docs/operating.md, Buckets that do not answer\n"
)
_ERROR_CHARACTERS = 300


@dataclass
class _Probe:
    """A running check. Its thread hangs as long as the store hangs."""

    url: str
    done: "Future[None]"


class BucketCheck:
    """Checks one region's bucket periodically. At most one thread waits for a store with the current URL."""

    def __init__(self, engine: Engine, settings: BucketSettings, region: str) -> None:
        self._engine = engine
        self._settings = settings
        self._region = region
        self._backoff = ProbeBackoff(settings.retry_s, settings.retry_max_s)
        self._failures = 0
        """Consecutive failed checks."""
        self._probe: _Probe | None = None
        self._store: tuple[str, ObjectStore] | None = None
        """The current URL and its opened store."""

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            try:
                pause_s = await self.check()
            except Exception as error:  # Postgres does not answer, or is being migrated.
                _log.warning("the bucket of region %s was not checked: %s", self._region, error)
                pause_s = self._settings.interval_s
            await asyncio.sleep(pause_s)

    async def check(self) -> float:
        """Checks once and publishes a changed result; returns the seconds until the next check.

        Raises:
            SQLAlchemyError: Postgres does not answer.
        """
        known = await asyncio.to_thread(self._known)
        if known is None:
            return self._settings.interval_s
        error = await self._ask(known)
        if error is None:
            self._failures = 0
            await asyncio.to_thread(self._publish, BucketState(known.url, is_marked=True))
            return self._settings.interval_s
        self._failures += 1
        if known.failing_since_s is not None or self._failures >= self._settings.failures:
            await asyncio.to_thread(self._publish, replace(known, error=error))
        return self._backoff.pause_s(self._failures)

    def _known(self) -> BucketState | None:
        """Returns the published state of the region's bucket; None: the region does not exist."""
        with transaction(self._engine) as session:
            url = session.scalar(select(Region.bucket_url).where(Region.name == self._region))
            if url is None:
                return None
            found = bucket_states(session, [self._region]).get(self._region)
        return found if found is not None and found.url == url else BucketState(url)

    async def _ask(self, known: BucketState) -> str | None:
        """Returns why the check failed; None: it succeeded."""
        probe = self._probe
        if probe is None or probe.done.done() or probe.url != known.url:
            probe = self._probe = _Probe(known.url, _in_thread(lambda: self._check(known)))
        answer = asyncio.wrap_future(probe.done)
        # `wait_for` is not used because the thread cannot be cancelled. The next check uses its answer.
        await asyncio.wait([answer], timeout=self._settings.timeout_s)
        if not answer.done():
            return f"no answer within {self._settings.timeout_s:g} s"
        failure = answer.exception()
        return None if failure is None else (str(failure) or type(failure).__name__)[:_ERROR_CHARACTERS]

    def _check(self, known: BucketState) -> None:
        if self._store is None or self._store[0] != known.url:
            self._store = known.url, open_store(known.url)
        if not known.is_marked:
            self._store[1].put(ids.bucket_marker_key(self._region), _MARKER)
            return
        check_marker(self._store[1], self._region)

    def _publish(self, state: BucketState) -> None:
        """Publishes a changed state. Logs when the bucket fails, and when it answers again."""
        with transaction(self._engine) as session:
            before = bucket_states(session, [self._region]).get(self._region)
            if state.error and state.failing_since_s is None:
                state = replace(state, failing_since_s=_now_s(session))
            if state == before:
                return
            publish_bucket(session, self._region, state)
        was_failing = before is not None and before.failing_since_s is not None
        if state.error and not was_failing:
            _log.warning(
                "the bucket of region %s does not answer: %s; nothing is placed in the region until it does",
                self._region, state.error,
            )  # fmt: skip
        elif not state.error and was_failing:
            _log.warning("the bucket of region %s answers again", self._region)


def marked_regions(session: Session) -> dict[str, list[str]]:
    """Returns the regions in whose present bucket the marker was written, by URL."""
    urls = {region.name: region.bucket_url for region in session.scalars(select(Region).order_by(Region.name))}
    states = bucket_states(session, urls)
    marked: dict[str, list[str]] = defaultdict(list)
    for name, url in urls.items():
        if (state := states.get(name)) is not None and state.url == url and state.is_marked:
            marked[url].append(name)
    return marked


def check_marker(bucket: ObjectStore, region: str) -> None:
    """Checks that a store is the region's bucket, in which the marker was written.

    Raises:
        MissingObject: it lacks the marker. The message names the marker's key.
        Exception: any error of the store.
    """
    key = ids.bucket_marker_key(region)
    try:
        bucket.get(key)
    except MissingObject:
        message = f"its marker object {key} is missing: the bucket was removed, emptied or replaced"
        raise MissingObject(message) from None


def _now_s(session: Session) -> float:
    return float(session.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())


def _in_thread(work: Callable[[], None]) -> "Future[None]":
    """Runs `work` in a daemon thread, which does not keep the process alive."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="bucket check", daemon=True).start()
    return done
