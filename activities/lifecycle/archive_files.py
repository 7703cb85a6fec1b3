"""Writes uploaded working directories from Postgres to buckets. They may be too large for the memory."""

import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio.exceptions import ApplicationError

from domain import ids
from domain.blame import LaunchError
from domain.protocol.workloads import StageRequest
from infra.db.archive_parts import part_sizes
from infra.db.models import Attempt
from infra.db.session import transaction
from infra.db.tenants import Archive, ArchivePart
from mizzen.objects.store import ObjectStore

TRY_S = 20.0
"""How long one try of staging waits for the write of an archive. The activity may take 30 s."""
_WRITES = 4


@dataclass(frozen=True)
class UploadedArchive:
    """An uploaded working directory of a tenant."""

    tenant: str
    sha256: str
    size_bytes: int
    parts: tuple[str, ...] | None
    """The SHA-256 of its parts; None: it has none."""

    @classmethod
    def find(cls, session: Session, tenant: str, sha256: str | None) -> Self | None:
        """Returns an archive; None: there is none."""
        size = func.octet_length(Archive.body)
        own = (Archive.tenant == tenant, Archive.sha256 == sha256)
        row = session.execute(select(size, Archive.parts).where(*own)).first() if sha256 else None
        if row is None or sha256 is None:
            return None
        size_bytes, parts = row
        if parts is not None:
            sizes = part_sizes(session, tenant, parts)
            size_bytes = sum(sizes.get(part, 0) for part in parts)
        return cls(tenant, sha256, size_bytes, None if parts is None else tuple(parts))

    @contextmanager
    def file(self, engine: Engine) -> Iterator[Path]:
        """Writes the archive into a file without a name, of which a killed process leaves nothing.

        Raises:
            ApplicationError: `MissingArchive`: it was deleted meanwhile.
        """
        with tempfile.TemporaryFile(prefix="mizzen-archive-") as file:
            for part in [None] if self.parts is None else self.parts:
                body = select(Archive.body).where(Archive.tenant == self.tenant, Archive.sha256 == self.sha256)
                if part is not None:
                    body = select(ArchivePart.body).where(ArchivePart.tenant == self.tenant, ArchivePart.sha256 == part)
                with transaction(engine) as session:
                    found = session.scalar(body)
                if found is None:
                    raise _missing(self.sha256)
                file.write(found)
            file.flush()
            yield Path(f"/proc/self/fd/{file.fileno()}")


class ArchiveWriter:
    """Writes archives to buckets, in threads, because a write may take longer than the timeout of the activity.

    A later try, and other workloads with the same archive, wait for the same write.
    """

    def __init__(self, engine: Engine, try_s: float = TRY_S) -> None:
        self._engine = engine
        self._try_s = try_s
        self._threads = ThreadPoolExecutor(_WRITES, "archives")
        self._lock = threading.Lock()
        self._writes: dict[str, Future[None]] = {}

    def stage(self, store: ObjectStore, sha256: str, archive: UploadedArchive | None, *, again: bool) -> None:
        """Writes the archive into the bucket, unless it is there. `again`: always write it, because it is damaged.

        Raises:
            ApplicationError: of type `MissingArchive` if the archive is neither in the bucket nor in Postgres, and
                `SlowArchive` if it is still being written, so that the caller should try again.
        """
        key = ids.archive_key(sha256)
        there = store.size(key)
        if archive is None:
            if there is None:
                raise _missing(sha256)
            return
        where, is_whole = store.uri(key), there == archive.size_bytes
        with self._lock:
            write = self._writes.pop(where, None)
            if write is not None and write.done() and write.exception() is None and not is_whole:
                write = None  # The object was deleted since.
            if write is None and (again or not is_whole):
                write = self._threads.submit(self._write, store, key, archive)
            if write is None:
                return
            self._writes[where] = write
        if not wait([write], self._try_s).done:
            message = f"the working directory ({archive.size_bytes} bytes) is still being written to {where}"
            raise ApplicationError(message, type="SlowArchive")
        with self._lock:
            if self._writes.get(where) is write:
                del self._writes[where]
        write.result()

    def _write(self, store: ObjectStore, key: str, archive: UploadedArchive) -> None:
        with archive.file(self._engine) as path:
            store.put(key, path)


def was_damaged(session: Session, request: StageRequest) -> bool:
    """Returns whether the attempt before ended because an agent found the archive in the bucket damaged."""
    before = session.get(Attempt, (request.workload_id, request.attempt - 1))
    error = "" if before is None or before.outcome is None else str(before.outcome["detail"].get("error"))
    return error.startswith(LaunchError.DAMAGED_ARCHIVE)


def _missing(sha256: str) -> ApplicationError:
    return ApplicationError(
        f"the uploaded archive {sha256} does not exist any more", type=LaunchError.MISSING_ARCHIVE.value
    )
