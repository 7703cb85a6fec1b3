"""The log of a root: numbered records, each created once, that say which attempt may write and what is committed.

A record is a claim of an attempt or the manifest of a checkpoint. Whoever claims or commits creates the record after
the last one, which a store lets only one of several do; the others read on and try again. So claims and commits have
one order that all see: a commit comes before a newer attempt's claim, and is then that attempt's to load, or it meets
the claim in its place and is refused. Nothing else is needed of a store: no locks, no clocks.

Of several processes with the same attempt the one that claimed last commits: a claim names its process, and so does a
commit.

The newest record is never removed. One who slept while records were removed could create one of these numbers again,
but only below newer records; it looks at the log again afterwards, and finds that it is stale.
"""

import errno
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError, StaleAttemptError
from mizzen.checkpoint.manifest import Claim, Manifest, Record, parse
from mizzen.objects.store import MissingObject, ObjectStore

_PAUSES_S = (0.0, 0.01, 0.1, 1.0)
"""A listing of a folder that changes meanwhile may show neither a record that goes nor the one that made it go."""
_KEY = re.compile(r"log/(\d{10,})\.json")


@dataclass(frozen=True)
class LogEntry:
    """One record under its number."""

    number: int
    record: Record | None
    """None: it is damaged."""
    reason: str = ""
    """What is wrong with it."""


@dataclass(frozen=True)
class Claimed:
    """What a process holds of a root."""

    attempt: int
    number: int
    """The number of its record; 0: it has none, since it does not commit and the attempt was claimed already."""
    first: bool
    """Whether nobody had claimed the root for this attempt before."""


@contextmanager
def readable(where: str) -> Iterator[None]:
    """What an error of a store means: something missing or broken, or (anything else) nothing can be judged now.

    To go on without the newest checkpoint because of, say, a missing permission would throw good work away.

    Raises:
        CorruptCheckpointError: it is missing, or its disk gives an error.
        CheckpointError: any other error.
    """
    try:
        yield
    except CheckpointError:
        raise
    except MissingObject:
        raise CorruptCheckpointError(f"{where} is missing") from None
    except OSError as error:
        if error.errno in (errno.EIO, errno.EISDIR):
            raise CorruptCheckpointError(f"{where} cannot be read: {error.strerror}") from error
        raise CheckpointError(f"{where}: {error}") from error
    except Exception as error:  # Each store's library has its own.
        raise CheckpointError(f"{where}: {error}") from error


class Log:
    """The log of the root that `store` is, as it was when it was last read. Records are read once."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._entries: dict[int, LogEntry] = {}
        self._last = 0

    @property
    def where(self) -> str:
        """The root, for messages."""
        return self.store.uri("").rstrip("/")

    @property
    def entries(self) -> list[LogEntry]:
        """All records, the newest first."""
        return [self._entries[number] for number in sorted(self._entries, reverse=True)]

    @property
    def attempt(self) -> int:
        """The newest attempt that has claimed the root; 0: none has."""
        records = (entry.record for entry in self._entries.values())
        return max((record.attempt for record in records if isinstance(record, Claim | Manifest)), default=0)

    @property
    def last(self) -> int:
        """The number of the newest record that is known."""
        return self._last

    @property
    def checkpoints(self) -> list[tuple[int, Manifest]]:
        """Committed checkpoints with the numbers of their records, the newest first."""
        found = [(e.number, e.record) for e in self._entries.values() if isinstance(e.record, Manifest)]
        return sorted(found, key=lambda pair: (pair[1].id, pair[0]), reverse=True)

    @property
    def next_save(self) -> int:
        """A number for the next save, greater than all that are there."""
        return 1 + max((manifest.id.save for _, manifest in self.checkpoints), default=0)

    def refresh(self) -> None:
        """Read the records that are new, and forget those that are gone.

        Raises:
            CheckpointError: the store cannot be read.
        """
        with readable(f"{self.where}/log"):
            numbers = {int(found[1]) for info in self.store.list("log/") if (found := _KEY.fullmatch(info.key))}
        kept = {n: entry for n, entry in self._entries.items() if n in numbers and entry.record is not None}
        for number in numbers - kept.keys():
            entry = self._read(number)
            if entry is not None:
                kept[number] = entry
        self._entries = kept
        self._last = max(numbers, default=self._last)

    def _read(self, number: int) -> LogEntry | None:
        name = f"{self.where}/{_key(number)}"
        try:
            with readable(name):
                try:
                    raw = self.store.get(_key(number))
                except MissingObject:
                    return None  # It was removed meanwhile.
            record = parse(raw)
        except CorruptCheckpointError as error:
            return LogEntry(number, None, str(error))
        return LogEntry(number, record)

    def advance(self) -> None:
        """Read on after an `append` that found another record in its place.

        Raises:
            CheckpointError: there is nothing new, so what is in its place is no record.
        """
        before = self._last
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            self.refresh()
            if self._last > before:
                return
        raise CheckpointError(f"{self.where}/{_key(before + 1)} cannot be created, and is not listed either")

    def check(self, attempt: int) -> None:
        """Make sure that no newer attempt than `attempt` is known to have claimed the root.

        Raises:
            StaleAttemptError: one has.
        """
        if self.attempt > attempt:
            message = f"{self.where}: claimed by attempt {self.attempt}; attempt {attempt} may not write here"
            raise StaleAttemptError(message)

    def rival(self, claimed: Claimed, writer: str, adopted: Collection[str] = ()) -> Claim | Manifest | None:
        """A record of another process that took the root over after `claimed`, for the same attempt; None: none did.

        `adopted` are the names of checkpoints that this process has brought here itself.
        """
        for entry in self.entries:
            record = entry.record
            if entry.number <= claimed.number:
                break
            if not isinstance(record, Claim | Manifest) or record.attempt != claimed.attempt:
                continue
            if record.writer not in ("", writer) and not (isinstance(record, Manifest) and record.by in adopted):
                return record
        return None

    def append(self, record: Claim | Manifest) -> bool:
        """Create the record after the last known one; False if another one is there: then read on.

        Raises:
            Exception: the store's own; whether the record is there is not known then.
        """
        number = self._last + 1
        if not self.store.create(_key(number), record.to_bytes()):
            return False
        self._entries[number] = LogEntry(number, record)
        self._last = number
        return True

    def remove(self, number: int) -> None:
        """Remove the record, which must not be the newest."""
        if number >= self._last:
            raise ValueError(f"record {number} is the newest of {self.where}")
        self.store.delete(_key(number))
        self._entries.pop(number, None)


def _key(number: int) -> str:
    return f"log/{number:010d}.json"


def claim(
    log: Log, attempt: int | None, by: str, *, writer: str = "", at_least: int = 1, alone: bool = False
) -> Claimed:
    """Claim the root for `attempt`, or (None) for the next one, `at_least` that.

    Args:
        log: the root's.
        attempt: fencing number, from 1.
        by: for people: who claims.
        writer: names a process that will commit. It takes the root over from an earlier one of the same attempt;
            others of an attempt just share it.
        at_least: the least number that is taken where none is given.
        alone: whether nobody may have claimed the root for this attempt: the number was chosen, not given.

    Raises:
        StaleAttemptError: a newer attempt has claimed it, or (`alone`) somebody has for this one.
        CheckpointError: the store cannot be read.
    """
    log.refresh()
    while True:
        mine = max(log.attempt + 1, at_least) if attempt is None else attempt
        log.check(mine)
        taken = log.attempt == mine
        if taken and alone:
            raise StaleAttemptError(f"{log.where}: another process has claimed it as attempt {mine} meanwhile")
        if taken and not writer:
            return Claimed(mine, 0, False)
        if log.append(Claim(mine, round(time.time(), 3), by, writer)):
            number = log.last
            # One who slept meanwhile may have taken an old number.
            log.refresh()
            log.check(mine)
            return Claimed(mine, number, not taken)
        log.advance()
