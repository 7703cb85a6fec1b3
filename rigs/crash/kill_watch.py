"""An independent reader of a checkpoint root. It shares only the object store with the code under test.

It reads every object of the root, checks the checksums of all records and parts, and compares the content with that of
an uninterrupted run.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from mizzen.objects import MissingObject, ObjectStore, open_store
from rigs.crash.kill_training import Table

_RECORD = re.compile(r"log/(\d{10})\.json")
_PART = re.compile(r"parts/a(\d{4,})/step-(\d{10})\.r(\d{4})\.[0-9a-f]{8}/part-[^/]+")
_COPY = re.compile(r"parts/a(\d{4,})/step-(\d{10})\.r0000\.([0-9a-f]{8})/manifest\.json")
_SHARD = re.compile(r"shards/a(\d{4,})/step-\d{10}\.s\d{6}/r\d{4}\.json")
_STAGED = ".staging/"
_SETTLE_S = 0.02


@dataclass(frozen=True)
class Commit:
    """A checkpoint's record in the log."""

    number: int
    attempt: int
    save: int
    step: int
    parts: tuple[dict[str, Any], ...]
    copy: str
    """Key of the copy of the record."""
    broken: str
    """Reason why the checkpoint cannot be loaded; empty: it is valid."""

    @property
    def order(self) -> tuple[int, int]:
        """The sort key: the newest checkpoint has the greatest."""
        return self.attempt, self.save


@dataclass(frozen=True)
class Seen:
    """A snapshot of a root without concurrent writers."""

    commits: tuple[Commit, ...]
    """Newest first."""
    claims: tuple[tuple[int, int], ...]
    """(record number, attempt) of each claim."""
    objects: dict[str, bytes] = field(repr=False)
    wrong: tuple[str, ...]
    """Errors that no kill may cause: damaged records, invalid checkpoints, objects with unknown names."""
    empty_folders: int

    @property
    def newest(self) -> Commit | None:
        """The newest valid checkpoint; None: there is none."""
        return next((commit for commit in self.commits if not commit.broken), None)

    @property
    def loose(self) -> list[str]:
        """Keys of parts and shards that no checkpoint refers to, and of staged files."""
        named = {part["key"] for commit in self.commits for part in commit.parts} | {c.copy for c in self.commits}
        return sorted(key for key in self.objects if not key.startswith("log/") and key not in named)

    def loose_before(self, attempt: int) -> list[str]:
        """Returns the loose objects that a claim of `attempt` must have deleted: older attempts' and staged files."""
        found = []
        for key in self.loose:
            match = _PART.fullmatch(key) or _COPY.fullmatch(key) or _SHARD.fullmatch(key)
            if match is None or int(match[1]) < attempt:
                found.append(key)
        return found


def look(root: str, tables: list[Table] | None = None) -> Seen:
    """Reads a root (a folder or a bucket URL). `tables`: the expected contents by rank; None: no comparison."""
    folder = None if "://" in root else Path(root)
    objects = dict(_files(folder)) if folder else _bucket(root)
    empty = _empty_folders(folder) if folder else 0
    wrong: list[str] = []
    commits: list[Commit] = []
    claims: list[tuple[int, int]] = []
    for key, raw in objects.items():
        number = _RECORD.fullmatch(key)
        if number is None:
            if not (_PART.fullmatch(key) or _COPY.fullmatch(key) or _SHARD.fullmatch(key) or key.startswith(_STAGED)):
                wrong.append(f"{key}: an object with an unknown name")
            continue
        body = _record(raw)
        if body is None:
            wrong.append(f"{key}: the record is damaged")
        elif body["format"] == "mizzen.claim/1":
            claims.append((int(number[1]), body["attempt"]))
        else:
            why = _broken(body, objects, tables)
            parts = tuple(body["parts"])
            copy = f"parts/a{body['attempt']:04d}/step-{body['step']:010d}.r0000.{body['by']}/manifest.json"
            commits.append(Commit(int(number[1]), body["attempt"], body["save"], body["step"], parts, copy, why))
    commits.sort(key=lambda commit: commit.order, reverse=True)
    wrong += [f"record {commit.number} of step {commit.step}: {commit.broken}" for commit in commits if commit.broken]
    return Seen(tuple(commits), tuple(sorted(claims)), objects, tuple(wrong), empty)


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _empty_folders(folder: Path) -> int:
    return sum(not inner and not files for _, inner, files in os.walk(folder)) if folder.exists() else 0


@cache
def _opened(root: str) -> ObjectStore:
    return open_store(root)


def _bucket(root: str) -> dict[str, bytes]:
    """Reads all objects once the listing is stable: the server may still process a request of a killed process."""
    store = _opened(root)
    while True:
        before = list(store.list(""))
        time.sleep(_SETTLE_S)
        with suppress(MissingObject):
            objects = {info.key: store.get(info.key) for info in before}
            if list(store.list("")) == before:
                return objects


def _record(raw: bytes) -> dict[str, Any] | None:
    """Returns a record's content; None: the checksum is wrong.

    The checksum is the SHA-256 of the rest of the record as JSON with sorted keys and without spaces.
    """
    try:
        body: dict[str, Any] = json.loads(raw)
        told = body.pop("record_sha256")
    except (ValueError, KeyError, AttributeError):
        return None
    plain = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return body if hashlib.sha256(plain).hexdigest() == told else None


def _broken(body: dict[str, Any], objects: dict[str, bytes], tables: list[Table] | None) -> str:
    for part in body["parts"]:
        raw = objects.get(part["key"])
        if raw is None:
            return f"{part['key']} is missing"
        algorithm, _, told = part["checksum"].partition(":")
        digest = xxh3_128(raw).hexdigest() if algorithm == "xxh3_128" else hashlib.sha256(raw).hexdigest()
        if len(raw) != part["size_bytes"] or digest != told:
            return f"{part['key']} is damaged"
        if tables is not None:
            table = tables[part["rank"] or 0]
            if hashlib.sha256(raw).hexdigest() != table[body["step"], part["name"]]:
                return f"{part['key']} differs from an uninterrupted run at step {body['step']}"
    names = {(part["name"], part["rank"]) for part in body["parts"]}
    own = {name for name, rank in names if rank is not None}
    if tables is not None:
        wanted: set[tuple[str, int | None]] = {(name, rank) for name in own for rank in range(len(tables))}
        wanted |= {(name, None) for _, name in tables[0] if name not in own}
        if names != wanted:
            return f"parts {sorted(map(str, names))}: must be {sorted(map(str, wanted))}"
    return ""
