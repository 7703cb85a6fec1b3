"""Reads and validates a whole workload document; `checking` then checks it against the installation."""

import re
from dataclasses import dataclass
from typing import Any

from api.documents.at import At
from api.documents.jobs import JobDraft, read_jobs
from api.documents.loading import Value
from api.documents.values import duration_s, relative_path
from api.problems import FieldError
from domain.capacity import USUAL, CapacityKind
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from domain.spec import CheckpointSpec, LimitsSpec, WorkloadSpec

VERSION = 1
MAX_FILES = 256
MAX_FILES_BYTES = 256 << 10
MAX_LABELS = 64
MAX_LABEL_BYTES = 256
MAX_TABLES = 64
MAX_REGIONS = 256
MAX_RETRIES = 1000
MAX_KEPT = 100
MAX_FAILURES = 100_000
_DAY_S = 86400.0
_LONGEST_S = 366 * _DAY_S
_LONGEST_GRACE_S = 3600.0
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEYS = (
    "version", "name", "tenant", "labels", "priority", "recurring", "jobs", "tables", "files", "workdir",
    "checkpoint", "limits", "regions", "capacity", "keep",
)  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """The valid fields of a document, its errors, and the positions of values that must be checked further."""

    problems: list[FieldError]
    tenant: str | None
    tenant_at: At
    priority_at: At | None
    tables_at: list[tuple[At, str]]
    regions_at: list[tuple[At, str]]
    workdir_at: At | None
    workdir: str | None
    keep_at: At | None
    jobs: list[JobDraft]
    fields: dict[str, Any]

    def spec(self) -> WorkloadSpec:
        """Returns the specification. Call it only if the document has no errors."""
        return WorkloadSpec(jobs=tuple(job.spec() for job in self.jobs), **self.fields)


def read_workload(value: Value, default_tenant: str | None) -> Draft:
    """Reads the document `value`. If it names no tenant, the tenant of the caller's key, `default_tenant`, is used."""
    at = At("", value, [])
    if not isinstance(value, dict):
        at.wrong("the document must be a mapping with the keys " + ", ".join(_KEYS) if value is not None
                 else "the document is empty")  # fmt: skip
        return Draft(at.problems, default_tenant, at, None, [], [], None, None, None, [], {})
    members = at.section(_KEYS)
    if "version" in members and (members["version"].value != VERSION or members["version"].value is True):
        members["version"].wrong(f"must be {VERSION}, the only supported version")
    if "name" not in members:
        at.missing("name", "the workload needs a name")
    if "jobs" not in members:
        at.missing("jobs", "the workload needs at least one job")
    tenant_at = members.get("tenant", at.child("tenant", None))
    tenant = tenant_at.name() if "tenant" in members else default_tenant
    if tenant is None and "tenant" not in members:
        at.missing("tenant", "only a key with a tenant can omit it")
    tables = members["tables"].tables(MAX_TABLES) if "tables" in members else []
    workdir = read_workdir(members["workdir"]) if "workdir" in members else None
    allowed, excluded = _read_regions(members["regions"]) if "regions" in members else (None, [])
    fields = {
        "version": VERSION,
        "name": (members["name"].name() if "name" in members else None) or "",
        "tenant": tenant or "",
        "labels": read_labels(members["labels"]) if "labels" in members else {},
        "recurring": members["recurring"].name() if "recurring" in members else None,
        "level": members["priority"].integer(HIGHEST_LEVEL, LOWEST_LEVEL) if "priority" in members else None,
        "tables": tuple(name for _, name in tables),
        "files": read_files(members["files"]) if "files" in members else {},
        "workdir": workdir,
        "checkpoint": _read_checkpoint(members["checkpoint"]) if "checkpoint" in members else CheckpointSpec(),
        "limits": _read_limits(members["limits"]) if "limits" in members else LimitsSpec(),
        "regions_allowed": None if allowed is None else tuple(name for _, name in allowed),
        "regions_excluded": tuple(name for _, name in excluded),
        "capacity": _read_capacity(members["capacity"]) if "capacity" in members else None,
        "keep_s": duration_s(members["keep"], 0.0, _LONGEST_S) if "keep" in members else None,
    }
    return Draft(
        problems=at.problems,
        tenant=tenant,
        tenant_at=tenant_at,
        priority_at=members.get("priority"),
        tables_at=tables,
        regions_at=[*(allowed or []), *excluded],
        workdir_at=members.get("workdir"),
        workdir=workdir,
        keep_at=members.get("keep"),
        jobs=read_jobs(members["jobs"]) if "jobs" in members else [],
        fields=fields,
    )


def read_labels(at: At) -> dict[str, str]:
    """Reads the labels of a workload or service."""
    labels = {}
    for key, place in at.entries("a mapping of strings to strings", MAX_LABELS).items():
        value = place.text("a string", MAX_LABEL_BYTES)
        if not _LABEL.fullmatch(key):
            place.wrong(
                "a label's key must have 1 to 63 letters, digits or . _ / - and begin and end with a letter or digit"
            )
        elif value is not None:
            labels[key] = value
    return labels


def read_files(at: At) -> dict[str, str]:
    """Reads files that are given as text, by relative path."""
    files = {}
    for path, place in at.entries("a mapping of relative paths to strings", MAX_FILES).items():
        text = place.text("a string", MAX_FILES_BYTES)
        if relative_path(place, path) and text is not None:
            files[path] = text
    folders = {path[:end] for path in files for end in range(len(path)) if path[end] == "/"}
    for path in sorted(folders & files.keys()):
        at.child(path, files[path]).wrong("is a file, but other files use it as a folder")
    size = sum(len(text.encode()) for text in files.values())
    if size > MAX_FILES_BYTES:
        at.wrong(f"all files together may have at most {MAX_FILES_BYTES} bytes, but have {size}; use workdir for more")
    return files


def read_workdir(at: At, command: str = "mizzen submit") -> str | None:
    """Reads the SHA-256 of an archive. `command` uploads a folder; the message about a path names it."""
    place = at
    if isinstance(at.value, dict):
        members = at.section(("archive",))
        if "archive" not in members:
            at.missing("archive", "give the SHA-256 of an uploaded archive")
            return None
        place = members["archive"]
    elif isinstance(at.value, str) and not _SHA256.fullmatch(at.value):
        at.wrong(f"the API does not accept a path: use `{command}`, which uploads the folder, or upload a tar.gz "
                 "with PUT /v1/archives/<sha256> and write workdir: {archive: <sha256>}")  # fmt: skip
        return None
    text = place.text("the SHA-256 of an uploaded archive")
    if text is not None and not _SHA256.fullmatch(text):
        place.wrong("must be the SHA-256 of an uploaded archive, 64 hexadecimal digits in lower case")
        return None
    return text


def _read_checkpoint(at: At) -> CheckpointSpec:
    members = at.section(("interval", "grace", "keep", "max_failing", "max_failures"))
    default = CheckpointSpec()
    interval_s = duration_s(members["interval"], 0.1, _LONGEST_S) if "interval" in members else None
    grace_s = duration_s(members["grace"], 0.0, _LONGEST_GRACE_S) if "grace" in members else None
    keep = members["keep"].integer(1, MAX_KEPT) if "keep" in members else None
    return CheckpointSpec(
        interval_s=default.interval_s if interval_s is None else interval_s,
        grace_s=default.grace_s if grace_s is None else grace_s,
        keep=keep or default.keep,
        max_failing_s=duration_s(members["max_failing"], 1.0, _LONGEST_S) if "max_failing" in members else None,
        max_failures=members["max_failures"].integer(1, MAX_FAILURES) if "max_failures" in members else None,
    )


def _read_limits(at: At) -> LimitsSpec:
    members = at.section(("max_runtime", "max_silence", "max_pending", "retries"))
    return LimitsSpec(
        max_runtime_s=duration_s(members["max_runtime"], 1.0, _LONGEST_S) if "max_runtime" in members else None,
        max_silence_s=duration_s(members["max_silence"], 1.0, _LONGEST_S) if "max_silence" in members else None,
        max_pending_s=duration_s(members["max_pending"], 1.0, _LONGEST_S) if "max_pending" in members else None,
        retries=(members["retries"].integer(0, MAX_RETRIES) if "retries" in members else None) or 0,
    )


def _read_capacity(at: At) -> tuple[CapacityKind, ...]:
    kinds = {kind.value: kind for kind in CapacityKind}
    found: list[CapacityKind] = []
    for item in at.items("kinds of capacity", len(kinds)):
        kind = item.text("a kind of capacity")
        if kind is not None and kind not in kinds:
            item.wrong(f"must be one of {', '.join(kinds)}")
        elif kind is not None and kinds[kind] in found:
            item.wrong("is given twice")
        elif kind is not None:
            found.append(kinds[kind])
    if at.value == []:
        at.wrong(f"must contain at least one of {', '.join(kinds)}; the default is {', '.join(USUAL)}")
    return tuple(found)


def _read_regions(at: At) -> "tuple[list[tuple[At, str]] | None, list[tuple[At, str]]]":
    members = at.section(("allow", "exclude"))
    allowed = members["allow"].names("regions", MAX_REGIONS) if "allow" in members else None
    if allowed == [] and members["allow"].value == []:
        members["allow"].wrong("must contain at least one region; omit it to allow all")
    excluded = members["exclude"].names("regions", MAX_REGIONS) if "exclude" in members else []
    return allowed, excluded
