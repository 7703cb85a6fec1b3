"""Records of a root's log: the manifest of a checkpoint, the claim of an attempt; and what one rank has written."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from mizzen.checkpoint.errors import CorruptCheckpointError, StateError

MANIFEST_FORMAT = "mizzen.checkpoint/2"
CLAIM_FORMAT = "mizzen.claim/1"
SHARD_FORMAT = "mizzen.shard/1"

_SUM = "record_sha256"
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Which checkpoint: ids compare by when they were committed, the newest greatest.

    The attempt comes first because a newer attempt may have started from an older checkpoint, and `save` before `step`
    because training may go back to an earlier step.
    """

    attempt: int
    save: int
    """Number of the save in its root, over all attempts."""
    step: int

    @property
    def name(self) -> str:
        """Its name in words for people: `step-0000000123.a0002.n0007`."""
        return f"step-{self.step:010d}.a{self.attempt:04d}.n{self.save:04d}"


@dataclass(frozen=True)
class Part:
    """One named part of the state: one object."""

    name: str
    key: str
    """Where it is, relative to the root. May be among the parts of an earlier checkpoint, if it has not changed."""
    kind: str
    """`bytes`, `json`, `tensors` or `pickle`: how it is read (`mizzen.checkpoint.parts`)."""
    size_bytes: int
    checksum: str
    """`algorithm:hex`."""
    rank: int | None = None
    """The rank that it belongs to; None: it is every rank's."""


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint."""

    id: CheckpointId
    created_at_s: float
    """When it was committed, in seconds since the epoch."""
    parts: tuple[Part, ...]
    world_size: int = 1
    """Ranks that it was saved by."""
    by: str = ""
    """Which save made the record."""
    writer: str = ""
    """Which process saved it, or (in a gang) committed it."""

    @property
    def step(self) -> int:
        """The step whose state it holds."""
        return self.id.step

    @property
    def attempt(self) -> int:
        """The attempt that wrote it."""
        return self.id.attempt

    @property
    def name(self) -> str:
        """Its name in words for people."""
        return self.id.name

    @property
    def size_bytes(self) -> int:
        """Size of all parts together, of all ranks."""
        return sum(part.size_bytes for part in self.parts)

    def parts_of(self, rank: int) -> tuple[Part, ...]:
        """The parts that `rank` loads: its own, and those of all."""
        return tuple(part for part in self.parts if part.rank in (None, rank))

    def to_bytes(self) -> bytes:
        """The manifest as JSON, with its own checksum."""
        return _sealed(
            {
                "format": MANIFEST_FORMAT,
                "step": self.id.step,
                "attempt": self.id.attempt,
                "save": self.id.save,
                "created_at_s": self.created_at_s,
                "bytes": self.size_bytes,
                "world_size": self.world_size,
                "by": self.by,
                "writer": self.writer,
                "parts": [asdict(part) for part in self.parts],
            }
        )


@dataclass(frozen=True)
class Claim:
    """From this record on, no older attempt can commit."""

    attempt: int
    at_s: float
    """When, in seconds since the epoch."""
    by: str
    writer: str = ""
    """Which process will commit; empty: one that will not."""

    def to_bytes(self) -> bytes:
        """The claim as JSON, with its own checksum."""
        return _sealed(
            {
                "format": CLAIM_FORMAT,
                "attempt": self.attempt,
                "claimed_at_s": self.at_s,
                "by": self.by,
                "writer": self.writer,
            }
        )


@dataclass(frozen=True)
class Shard:
    """What one rank has put in the store for a checkpoint that is not committed yet."""

    rank: int
    parts: tuple[Part, ...]

    def to_bytes(self) -> bytes:
        """The shard as JSON, with its own checksum."""
        return _sealed({"format": SHARD_FORMAT, "rank": self.rank, "parts": [asdict(part) for part in self.parts]})


Record: TypeAlias = Manifest | Claim | Shard


def parse(raw: bytes) -> Record:
    """The record that `to_bytes` wrote. Keys that this version does not know are left alone.

    Raises:
        CorruptCheckpointError: it is damaged, or of another format.
    """
    try:
        body = json.loads(raw)
        expected = body.pop(_SUM)
        if _digest(body) != expected:
            raise CorruptCheckpointError("the record does not match its own checksum")
        if body["format"] == MANIFEST_FORMAT:
            return Manifest(
                id=CheckpointId(step=body["step"], attempt=body["attempt"], save=body["save"]),
                created_at_s=body["created_at_s"],
                parts=tuple(_part(part) for part in body["parts"]),
                world_size=body["world_size"],
                by=body["by"],
                writer=body.get("writer", ""),
            )
        if body["format"] == CLAIM_FORMAT:
            return Claim(body["attempt"], body["claimed_at_s"], body["by"], body.get("writer", ""))
        if body["format"] == SHARD_FORMAT:
            return Shard(body["rank"], tuple(_part(part) for part in body["parts"]))
        raise CorruptCheckpointError(f"the record has format {body['format']!r}, which this version does not know")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"the record cannot be read: {error!r}") from error


def check_part_name(name: Any) -> None:
    """Make sure that a part may have this name.

    Raises:
        StateError: it may not.
    """
    if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
        rule = "a name is 1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
        raise StateError(f"part {name!r}: {rule}")


def _part(body: dict[str, Any]) -> Part:
    key = body["key"]
    # The checksum finds accidents only: a record that somebody wrote must not lead out of the root either.
    if not isinstance(key, str) or not key.startswith("parts/") or ".." in key.split("/"):
        raise CorruptCheckpointError(f"the record names {key!r}, which is no part's place")
    return Part(body["name"], key, body["kind"], body["size_bytes"], body["checksum"], body["rank"])


def _sealed(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, _SUM: _digest(body)}, indent=1).encode()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
