"""The log of a root: numbered records that define which attempt may write and which checkpoints are committed.

A record is the claim of an attempt or the manifest of a checkpoint. To claim or to commit, a process creates the record
with the number after the last one. The store lets only one process create it; the others read the new records and try
again. So all processes see claims and commits in one order. A commit either precedes a newer attempt's claim, and then
that attempt loads it; or it finds the claim in its place, and fails. No locks and no clocks are needed.

Of several processes with the same attempt number, only the last to claim may commit: every claim and every commit names
its process.

The newest record is never removed. A process that was paused while records were removed can create a freed number
again, but only below newer records. It rereads the log afterwards and finds that it is stale.
"""

import errno
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from mizzen.checkpoint.errors import CheckpointError, CorruptCheckpointError, StaleAttemptError
from mizzen.checkpoint.manifest import Claim, Manifest, Record, parse
from mizzen.objects.store import MissingObject, ObjectStore

_PAUSES_S = (0.0, 0.01, 0.1, 1.0)
"""A listing taken during writes can miss both a deleted record and its replacement; list again after these pauses."""
_KEY = re.compile(r"log/(\d{10,})\.json")


class LogEntry(NamedTuple):
    """A record and its number in the log."""

    number: int
    record: Record | None
    """None if the record is damaged."""
    reason: str = ""
    """Why the record cannot be used, if it is damaged."""


class Claimed(NamedTuple):
    """The result of a claim."""

    attempt: int
    number: int
    """Number of the claim's record; 0 if none was created, because the process shares an existing claim."""
    first: bool
    """Whether this is the first claim of the root for this attempt."""


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Translate errors of a store. `where` names the object in the message.

    Only a missing object and a disk error count as damage. Any other error, such as a missing permission, must not make
    a load fall back to an older checkpoint: that would discard valid work.

    Raises:
        CorruptCheckpointError: the object is missing, or the disk reports an I/O error.
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
    except Exception as error:  # Every client library has its own exception types.
        raise CheckpointError(f"{where}: {error}") from error


class Log:
    """A snapshot of a root's log, as of the last `refresh`. Each record is read only once."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._entries: dict[int, LogEntry] = {}
        self._last = 0

    @property
    def where(self) -> str:
        """URI of the root, for messages."""
        return self.store.uri("").rstrip("/")

    @property
    def entries(self) -> list[LogEntry]:
        """All records, newest first."""
        return [self._entries[number] for number in sorted(self._entries, reverse=True)]

    @property
    def attempt(self) -> int:
        """The newest attempt that has claimed the root; 0 if there is none."""
        records = (entry.record for entry in self._entries.values())
        return max((record.attempt for record in records if isinstance(record, Claim | Manifest)), default=0)

    @property
    def last(self) -> int:
        """Number of the newest known record."""
        return self._last

    @property
    def checkpoints(self) -> list[tuple[int, Manifest]]:
        """Committed checkpoints with the numbers of their records, newest first."""
        found = [(e.number, e.record) for e in self._entries.values() if isinstance(e.record, Manifest)]
        return sorted(found, key=lambda pair: (pair[1].id, pair[0]), reverse=True)

    @property
    def next_save(self) -> int:
        """The next free save number: one more than the greatest in the log."""
        return 1 + max((manifest.id.save for _, manifest in self.checkpoints), default=0)

    def refresh(self) -> None:
        """Read new records, and drop records that were removed from the store.

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

    def part_sizes(self) -> dict[str, int]:
        """Return the sizes of all stored parts by key.

        Raises:
            CheckpointError: the parts cannot be listed.
        """
        with readable(f"{self.where}/parts"):
            return {info.key: info.size_bytes for info in self.store.list("parts/")}

    def _read(self, number: int) -> LogEntry | None:
        name = f"{self.where}/{_key(number)}"
        try:
            with readable(name):
                try:
                    raw = self.store.get(_key(number))
                except MissingObject:
                    return None  # Another process removed it after the listing.
            record = parse(raw)
        except CorruptCheckpointError as error:
            return LogEntry(number, None, str(error))
        return LogEntry(number, record)

    def advance(self) -> None:
        """Read the new records after an `append` found its number taken.

        Raises:
            CheckpointError: the listing shows no new record, so the object in its place is not a record.
        """
        before = self._last
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            self.refresh()
            if self._last > before:
                return
        raise CheckpointError(f"{self.where}/{_key(before + 1)} cannot be created: the key is taken, but not listed")

    def check(self, attempt: int) -> None:
        """Check that no attempt newer than `attempt` has claimed the root, as far as the log was read.

        Raises:
            StaleAttemptError: a newer attempt has claimed it.
        """
        if self.attempt > attempt:
            message = f"{self.where}: claimed by attempt {self.attempt}; attempt {attempt} may not write there"
            raise StaleAttemptError(message)

    def rival(self, claimed: Claimed, writer: str, adopted: Collection[str] = ()) -> Claim | Manifest | None:
        """Return a record that another process of the same attempt created after `claimed`; None if there is none.

        `adopted` holds `Manifest.by` of checkpoints that this process copied itself; these are ignored.
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
        """Create `record` after the last known one; return False if that number is taken (then call `advance`).

        Raises:
            Exception: an error of the store. It is then unknown whether the record was created.
        """
        number = self._last + 1
        if not self.store.create(_key(number), record.to_bytes()):
            return False
        self._entries[number] = LogEntry(number, record)
        self._last = number
        return True

    def remove(self, number: int) -> None:
        """Remove a record that is not the newest.

        Raises:
            ValueError: it is the newest record.
        """
        if number >= self._last:
            raise ValueError(f"record {number} is the newest of {self.where} and must not be removed")
        self.store.delete(_key(number))
        self._entries.pop(number, None)


def _key(number: int) -> str:
    return f"log/{number:010d}.json"


def claim(
    log: Log, attempt: int | None, by: str, *, writer: str = "", at_least: int = 1, alone: bool = False
) -> Claimed:
    """Claim the root for `attempt`.

    Args:
        log: log of the root.
        attempt: fencing token, 1 or more; None for the next free number.
        by: name of the claiming process, for people.
        writer: unique id of a process that will commit; it takes over from earlier processes of the same attempt. A
            process without an id shares an existing claim.
        at_least: lower bound of the number if `attempt` is None.
        alone: fail if the root is already claimed for this attempt. Used if this process chose the number itself.

    Raises:
        StaleAttemptError: a newer attempt has claimed the root, or (`alone`) another process of the same attempt has.
        CheckpointError: the store cannot be read.
    """
    log.refresh()
    while True:
        mine = max(log.attempt + 1, at_least) if attempt is None else attempt
        log.check(mine)
        taken = log.attempt == mine
        if taken and alone:
            raise StaleAttemptError(f"{log.where}: another process has already claimed it as attempt {mine}")
        if taken and not writer:
            return Claimed(mine, 0, False)
        if log.append(Claim(mine, round(time.time(), 3), by, writer)):
            number = log.last
            # If this process was paused, it may have created a freed number below newer records.
            log.refresh()
            log.check(mine)
            return Claimed(mine, number, not taken)
        log.advance()
