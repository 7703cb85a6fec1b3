"""The records of a root: manifests of checkpoints, claims of attempts, and shard records of single ranks."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from mizzen.checkpoint.errors import CorruptCheckpointError, StateError
from mizzen.objects import checksums

MANIFEST_FORMAT = "mizzen.checkpoint/2"
CLAIM_FORMAT = "mizzen.claim/1"
SHARD_FORMAT = "mizzen.shard/1"

COPY_NAME = "manifest.json"
"""Name of the copy of a checkpoint's record, in the folder of its parts. Names of parts begin with `part-`."""

_SUM = "record_sha256"
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Identifies a checkpoint. Ids sort by commit order, the newest last.

    The attempt is compared first, because a newer attempt may have started from an older checkpoint. `save` is compared
    before `step`, because training may return to an earlier step.
    """

    attempt: int
    save: int
    """Number of the save, counted over all attempts of the root."""
    step: int

    @property
    def name(self) -> str:
        """Readable name, such as `step-0000000123.a0002.n0007`."""
        return f"step-{self.step:010d}.a{self.attempt:04d}.n{self.save:04d}"


@dataclass(frozen=True)
class Part:
    """One named part of the state, stored as one object."""

    name: str
    key: str
    """Key of the object, relative to the root. An unchanged part has the key that an earlier checkpoint gave it."""
    kind: str
    """Encoding of the part: `bytes`, `json`, `tensors` or `pickle` (`mizzen.checkpoint.parts`)."""
    size_bytes: int
    checksum: str
    """Checksum of the content, as `algorithm:hex`."""
    rank: int | None = None
    """The rank that the part belongs to; None if all ranks share it."""


@dataclass(frozen=True)
class Manifest:
    """The record of a committed checkpoint: its id, and the key, size and checksum of each part."""

    id: CheckpointId
    created_at_s: float
    """Time of the commit, in seconds since the epoch."""
    parts: tuple[Part, ...]
    world_size: int = 1
    """Number of ranks that saved it."""
    by: str = ""
    """Unique id of the save that created the record."""
    writer: str = ""
    """Unique id of the process that committed it."""
    scores: tuple[tuple[str, float], ...] = ()
    """Names and values by which checkpoints are compared (`Checkpointer(best=...)`)."""

    @property
    def step(self) -> int:
        """The step whose state the checkpoint holds."""
        return self.id.step

    @property
    def attempt(self) -> int:
        """The attempt that committed the checkpoint."""
        return self.id.attempt

    @property
    def name(self) -> str:
        """Readable name, such as `step-0000000123.a0002.n0007`."""
        return self.id.name

    @property
    def size_bytes(self) -> int:
        """Total size of all parts of all ranks."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def sent_bytes(self) -> int:
        """Size of the parts that were written for this checkpoint, and not taken over from an earlier one."""
        folder = f"parts/a{self.id.attempt:04d}/step-{self.id.step:010d}."
        return sum(part.size_bytes for part in self.parts if part.key.startswith(folder))

    @property
    def copy_key(self) -> str:
        """Key of the copy of this record, beside the parts that its save has written (see `lost_records`)."""
        return f"parts/a{self.id.attempt:04d}/step-{self.id.step:010d}.r0000.{self.by}/{COPY_NAME}"

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the parts and of the copy of this record."""
        return frozenset({self.copy_key, *(part.key for part in self.parts)})

    def parts_of(self, rank: int) -> tuple[Part, ...]:
        """Return the parts that `rank` loads: its own parts and the shared parts."""
        return tuple(part for part in self.parts if part.rank in (None, rank))

    def to_bytes(self) -> bytes:
        """Encode the manifest as JSON that includes its own checksum."""
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
                **({"scores": dict(self.scores)} if self.scores else {}),
                "parts": [asdict(part) for part in self.parts],
            }
        )


@dataclass(frozen=True)
class Claim:
    """A record that fences older attempts: after it, only this attempt or a newer one can commit."""

    attempt: int
    at_s: float
    """Time of the claim, in seconds since the epoch."""
    by: str
    writer: str = ""
    """Unique id of the process that claims in order to commit; empty if it will not commit."""

    def to_bytes(self) -> bytes:
        """Encode the claim as JSON that includes its own checksum."""
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
    """The parts that one rank has written for a checkpoint that is not committed yet."""

    rank: int
    parts: tuple[Part, ...]

    def to_bytes(self) -> bytes:
        """Encode the shard as JSON that includes its own checksum."""
        return _sealed({"format": SHARD_FORMAT, "rank": self.rank, "parts": [asdict(part) for part in self.parts]})


Record: TypeAlias = Manifest | Claim | Shard


def parse(raw: bytes) -> Record:
    """Parse a record that `to_bytes` encoded. Unknown keys are ignored.

    Raises:
        CorruptCheckpointError: the record is damaged, or has an unknown format.
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
                scores=tuple((str(name), float(value)) for name, value in body.get("scores", {}).items()),
            )
        if body["format"] == CLAIM_FORMAT:
            return Claim(body["attempt"], body["claimed_at_s"], body["by"], body.get("writer", ""))
        if body["format"] == SHARD_FORMAT:
            return Shard(body["rank"], tuple(_part(part) for part in body["parts"]))
        raise CorruptCheckpointError(f"the record's format {body['format']!r} needs a newer version of mizzen")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"the record cannot be read: {error!r}") from error


def check_part_name(name: Any) -> None:
    """Check that `name` is a valid part name.

    Raises:
        StateError: the name is invalid.
    """
    if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
        rule = "a name must be 1 to 100 letters, digits, '.', '_' and '-', and begin with a letter or digit"
        raise StateError(f"part {name!r}: {rule}")


def _part(body: dict[str, Any]) -> Part:
    key = body["key"]
    # The checksum detects only accidental damage: a forged record must not name a key outside the root.
    if not isinstance(key, str) or not key.startswith("parts/") or ".." in key.split("/"):
        raise CorruptCheckpointError(f"the record names the key {key!r}, which is not below parts/")
    return Part(body["name"], key, body["kind"], body["size_bytes"], body["checksum"], body["rank"])


def _sealed(body: dict[str, Any]) -> bytes:
    return json.dumps({**body, _SUM: _digest(body)}, indent=1).encode()


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return checksums.checksum("sha256", [text.encode()]).removeprefix("sha256:")
