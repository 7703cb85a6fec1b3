"""Which partitions jobs read of their tables, beside an instance of the placement of data, whose tables are whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from domain.instance import DOCUMENT_VERSION


@dataclass(frozen=True, slots=True)
class Reads:
    """Partitions are named `table/partition` (`domain.ids.split_read`)."""

    size_bytes: Mapping[str, float] = field(default_factory=dict)
    """Of each partition that is named below."""
    by_job: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Job to the partitions that it reads: of the tables that they are of, it reads nothing else. Of its other tables
    it reads all."""


def reads_document(reads: Reads) -> dict[str, Any]:
    """The reads as their document, for JSON."""
    return {
        "version": DOCUMENT_VERSION,
        "partitions": dict(reads.size_bytes),
        "reads": [{"job": job, "partitions": list(names)} for job, names in reads.by_job.items()],
    }
