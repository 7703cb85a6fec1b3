"""Reads uploaded working directories from Postgres, as files: they may be too large for the memory."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from temporalio.exceptions import ApplicationError

from infra.db.archive_parts import part_sizes
from infra.db.session import transaction
from infra.db.tenants import Archive, ArchivePart


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
            size_bytes = sum(sizes[part] for part in parts)
        return cls(tenant, sha256, size_bytes, None if parts is None else tuple(parts))

    @contextmanager
    def file(self, engine: Engine) -> Iterator[Path]:
        """Writes the archive into a temporary file, which is removed on exit.

        Raises:
            ApplicationError: `MissingArchive`: it was deleted meanwhile.
        """
        with tempfile.NamedTemporaryFile(prefix="mizzen-archive-") as file:
            for part in [None] if self.parts is None else self.parts:
                with transaction(engine) as session:
                    body = select(Archive.body).where(Archive.tenant == self.tenant, Archive.sha256 == self.sha256)
                    if part is not None:
                        own = (ArchivePart.tenant == self.tenant, ArchivePart.sha256 == part)
                        body = select(ArchivePart.body).where(*own)
                    found = session.scalar(body)
                if found is None:
                    message = f"the uploaded archive {self.sha256} does not exist any more"
                    raise ApplicationError(message, type="MissingArchive")
                file.write(found)
            file.flush()
            yield Path(file.name)
