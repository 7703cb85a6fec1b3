"""The partitions that jobs read. A placement instance (`domain.instance`) itself contains only whole tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from domain.instance import DOCUMENT_VERSION


@dataclass(frozen=True, slots=True)
class Reads:
    """The partitions that jobs read. A partition is named `table/partition` (`domain.ids.split_read`)."""

    size_bytes: Mapping[str, float] = field(default_factory=dict)
    """Size of each partition in `by_job`."""
    by_job: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Job to the partitions that it reads. The job reads no other partition of the same tables; its tables without a
    partition here are read completely."""


def reads_document(reads: Reads) -> dict[str, Any]:
    """Returns the reads as a document that can be written as JSON."""
    return {
        "version": DOCUMENT_VERSION,
        "partitions": dict(reads.size_bytes),
        "reads": [{"job": job, "partitions": list(names)} for job, names in reads.by_job.items()],
    }
