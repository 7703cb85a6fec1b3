"""The manifest of a checkpoint: what is in it, and the checksum of every part and of itself."""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from mizzen.checkpoint.errors import CorruptCheckpointError

FORMAT = "mizzen.checkpoint/1"
MANIFEST_FILE = "manifest.json"

_NAME = re.compile(r"step-(\d{10,})\.a(\d{4,})\.n(\d{4,})")
_FILE = re.compile(r"part-[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Which checkpoint: ids compare by when they were committed, the newest greatest.

    The attempt comes first because a newer attempt may have started from an older checkpoint, and `save` before `step`
    because training may go back to an earlier step.
    """

    attempt: int
    save: int
    """Number of the save in its folder, over all attempts."""
    step: int

    @property
    def name(self) -> str:
        """The name of its folder: `step-0000000123.a0002.n0007`."""
        return f"step-{self.step:010d}.a{self.attempt:04d}.n{self.save:04d}"

    @classmethod
    def parse(cls, name: str) -> "CheckpointId | None":
        """The id that a folder's name stands for; None if it is no checkpoint's."""
        found = _NAME.fullmatch(name)
        if not found:
            return None
        made = cls(step=int(found[1]), attempt=int(found[2]), save=int(found[3]))
        return made if made.name == name else None


@dataclass(frozen=True)
class Part:
    """One named part of the state: one file."""

    name: str
    file: str
    kind: str
    """`bytes`, `json` or `arrays`: how the file is read (`mizzen.checkpoint.parts`)."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint."""

    id: CheckpointId
    created_at_s: float
    """When it was committed, in seconds since the epoch."""
    parts: tuple[Part, ...]

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
        """The name of its folder."""
        return self.id.name

    @property
    def size_bytes(self) -> int:
        """Size of all parts together."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def files(self) -> tuple[str, ...]:
        """Its files, relative to the root, in the order in which a copy must write them: the manifest last."""
        return tuple(f"{self.name}/{file}" for file in (*(part.file for part in self.parts), MANIFEST_FILE))

    def to_bytes(self) -> bytes:
        """The manifest as JSON, with its own checksum."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "step": self.id.step,
            "attempt": self.id.attempt,
            "save": self.id.save,
            "created_at_s": self.created_at_s,
            "bytes": self.size_bytes,
            "parts": [
                {"name": p.name, "file": p.file, "kind": p.kind, "bytes": p.size_bytes, "sha256": p.sha256}
                for p in self.parts
            ],
        }
        body["manifest_sha256"] = _digest(body)
        return json.dumps(body, indent=1).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Manifest":
        """The manifest that `to_bytes` wrote. Keys that this version does not know are left alone.

        Raises:
            CorruptCheckpointError: it is damaged, or of another format.
        """
        try:
            body = json.loads(raw)
            expected = body.pop("manifest_sha256")
            if _digest(body) != expected:
                raise CorruptCheckpointError(f"{MANIFEST_FILE} does not match its own checksum")
            if body["format"] != FORMAT:
                raise CorruptCheckpointError(f"{MANIFEST_FILE} has format {body['format']!r}: this reads {FORMAT!r}")
            return cls(
                id=CheckpointId(step=body["step"], attempt=body["attempt"], save=body["save"]),
                created_at_s=body["created_at_s"],
                parts=tuple(_part(part) for part in body["parts"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{MANIFEST_FILE} cannot be read: {error!r}") from error


def _part(body: dict[str, Any]) -> Part:
    part = Part(body["name"], body["file"], body["kind"], body["bytes"], body["sha256"])
    if not _FILE.fullmatch(part.file):
        raise ValueError(f"the file name {part.file!r} of part {part.name!r} is not part-<name>")
    return part


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
