"""Looking at a root without a claim: `open_checkpoints` lists, verifies and loads, and never changes anything.

    found = open_checkpoints("s3://bucket/run-7")
    for manifest in found.list():
        print(manifest.step, manifest.size_bytes, found.verify(manifest) or "whole")
    state = found.load(1000).state

A `Checkpointer` is for a training: its saves need a claim, which ends the right of another process to save. What is
here can be used while the training runs, and on a root that can only be read.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError, MissingCheckpointError
from mizzen.checkpoint.headers import TensorInfo, tensors_of
from mizzen.checkpoint.log import Log, readable
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.checkpoint.reading import Checkpoint, Reader, Skipped, load_one
from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.streaming import Damage, DamagedPart, stream
from mizzen.objects.store import ObjectStore

_TRIES = 5
"""How often a root is read again whose checkpoints are replaced while they are read."""

_Content = tuple[str, int, str]
"""Key, size and checksum of a part: parts that several checkpoints share are verified once."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a part of a checkpoint."""

    part: str
    rank: int | None
    """The rank that the part belongs to; None: it is every rank's."""
    key: str
    """Where the part should be, relative to the root."""
    what: Damage
    """`missing`; `size` or `checksum` where it differs from what was committed; `unreadable`: the disk failed."""
    detail: str
    """The same as a sentence."""


Problems: TypeAlias = list[Problem]
Judged: TypeAlias = list[tuple[Manifest, Problems]]
_Manifests: TypeAlias = list[Manifest]


class Checkpoints:
    """The checkpoints of one root, for reading. Made by `open_checkpoints`; each call reads the log again."""

    def __init__(self, store: ObjectStore) -> None:
        """The root that `store` is.

        Raises:
            MissingCheckpointError: it is no root: it has no record of an attempt or a checkpoint.
            CheckpointError: it cannot be read.
        """
        self._store = store
        self._log = Log(store)
        self._log.refresh()
        if not self._log.entries:
            raise MissingCheckpointError(
                f"{self.root}: there is no root of checkpoints here (a root has the folders log/ and parts/)"
            )

    @property
    def root(self) -> str:
        """URI of the root."""
        return self._log.where

    @property
    def store(self) -> ObjectStore:
        """The store that has the parts, under their keys."""
        return self._store

    def list(self) -> _Manifests:
        """All committed checkpoints, the newest first. Parts of them may be damaged: see `survey` and `verify`.

        Raises:
            CheckpointError: the log cannot be read.
        """
        self._log.refresh()
        return [manifest for _, manifest in self._log.checkpoints]

    def damaged_records(self, newer_than: Manifest | None = None) -> tuple[Skipped, ...]:
        """Records of the log that cannot be read, as of the last call: each may have been a checkpoint.

        Args:
            newer_than: only records after the one of this checkpoint.
        """
        numbers = [number for number, manifest in self._log.checkpoints if manifest == newer_than]
        least = max(numbers, default=0)
        return tuple(
            Skipped(f"record {entry.number} of the log", entry.reason)
            for entry in self._log.entries
            if entry.record is None and entry.number > least
        )

    def get(self, step: int | None = None) -> Manifest:
        """The newest checkpoint of `step`, or (None) the newest of all.

        Raises:
            MissingCheckpointError: there is none; the message lists the steps that there are.
            CheckpointError: the log cannot be read.
        """
        found = self.list()
        for manifest in found:
            if step is None or manifest.step == step:
                return manifest
        if not found:
            raise MissingCheckpointError(f"{self.root}: no checkpoint is committed here")
        steps = ", ".join(str(one) for one in sorted({manifest.step for manifest in found}))
        raise MissingCheckpointError(f"{self.root}: there is no checkpoint of step {step}; there are those of {steps}")

    def survey(self) -> Judged:
        """All checkpoints, the newest first, each with the parts that are missing or of a wrong size. Reads no part.

        Raises:
            CheckpointError: the root cannot be read.
        """
        for _ in range(_TRIES):
            found = self.list()
            with readable(f"{self.root}/parts"):
                sizes = {info.key: info.size_bytes for info in self._store.list("parts/")} if found else {}
            judged = [(manifest, _by_size(manifest, sizes)) for manifest in found]
            # A checkpoint that was removed meanwhile is not a damaged one.
            if not any(problems for _, problems in judged) or {m.id for m in found} <= {m.id for m in self.list()}:
                return judged
        raise self._outrun()

    def verify(
        self, step: int | Manifest | None = None, *, progress: Callable[[int], object] | None = None
    ) -> Problems:
        """Read every part of a checkpoint and compare it with its checksum; what is wrong, nothing if it is whole.

        Args:
            step: the newest checkpoint of this step, or this checkpoint itself; None: the newest of all.
            progress: called with the number of bytes of each piece that was read.

        Raises:
            MissingCheckpointError: there is no such checkpoint, or it was removed meanwhile.
            CheckpointError: a part cannot be read for another reason than being damaged.
        """
        for _ in range(_TRIES):
            manifest = step if isinstance(step, Manifest) else self.get(step)
            problems = self._problems(manifest, {}, progress)
            if not problems or self._is_there(manifest):
                return problems
            if step is not None:
                raise self._removed(manifest)
        raise self._outrun()

    def verify_all(self, *, progress: Callable[[int], object] | None = None) -> Judged:
        """As `verify`, for all checkpoints, the newest first. A part that several of them share is read once.

        Raises:
            CheckpointError: a part cannot be read for another reason than being damaged.
        """
        known: dict[_Content, Problem | None] = {}
        judged = [(manifest, self._problems(manifest, known, progress)) for manifest in self.list()]
        return [(manifest, problems) for manifest, problems in judged if not problems or self._is_there(manifest)]

    def load(self, step: int | Manifest | None = None, rank: int = 0, trusted: bool = False) -> Checkpoint:
        """Load a checkpoint as `rank` of the gang that saved it would.

        Args:
            step: the newest checkpoint of this step, or this checkpoint itself; None: the newest one that is whole,
                with a `CheckpointWarning` for each that is passed over.
            rank: whose own parts to load beside those of all ranks.
            trusted: whether parts that were saved as `Pickled` may be loaded: that can run any code.

        Raises:
            ValueError: the gang had no such rank.
            MissingCheckpointError: there is no such checkpoint, or it was removed meanwhile.
            CorruptCheckpointError: it is damaged, or (None) all are.
            CheckpointError: something cannot be read for another reason.
        """
        if step is not None:
            wanted = step if isinstance(step, Manifest) else self.get(step)
            try:
                return self._load(wanted, rank, trusted)
            except CorruptCheckpointError as error:
                if self._is_there(wanted):
                    raise
                raise self._removed(wanted) from error
        for _ in range(_TRIES):
            newest = self.get()
            skipped = list(self.damaged_records(newest))
            for manifest in self.list():
                try:
                    found = self._load(manifest, rank, trusted)
                except CorruptCheckpointError as error:
                    if not self._is_there(manifest):
                        break
                    skipped.append(Skipped(manifest.name, str(error)))
                    continue
                for one in skipped:
                    message = f"{self.root}: {one.name} is passed over: {one.reason}"
                    warnings.warn(message, CheckpointWarning, stacklevel=2)
                return found
            else:
                reasons = "; ".join(f"{one.name}: {one.reason}" for one in skipped)
                raise CorruptCheckpointError(f"{self.root}: no checkpoint can be loaded: {reasons}")
        raise self._outrun()

    def tensors(self, part: Part) -> tuple[TensorInfo, ...]:
        """Names, types and shapes of the tensors in a part of the kind `tensors`; none for other kinds.

        Raises:
            CorruptCheckpointError: the part is missing, or its header cannot be read.
            CheckpointError: it cannot be read for another reason.
        """
        return tensors_of(self._store, part) if part.kind == "tensors" else ()

    def _load(self, manifest: Manifest, rank: int, trusted: bool) -> Checkpoint:
        check_rank(manifest, rank)
        return load_one(self._store, manifest, Reader(rank, manifest.world_size, trusted))

    def _problems(
        self,
        manifest: Manifest,
        known: dict[_Content, Problem | None],
        progress: Callable[[int], object] | None,
    ) -> Problems:
        found = []
        for part in manifest.parts:
            content = (part.key, part.size_bytes, part.checksum)
            if content not in known:
                known[content] = self._problem(part, progress)
            if problem := known[content]:
                found.append(_of_part(part, problem.what, problem.detail))
        return found

    def _problem(self, part: Part, progress: Callable[[int], object] | None) -> Problem | None:
        try:
            for piece in stream(self._store, part):
                if progress is not None:
                    progress(len(piece))
        except DamagedPart as error:
            return _of_part(part, error.what, str(error))
        return None

    def _is_there(self, manifest: Manifest) -> bool:
        return any(known == manifest for known in self.list())

    def _removed(self, manifest: Manifest) -> MissingCheckpointError:
        return MissingCheckpointError(f"{self.root}: {manifest.name} was removed while it was read")

    def _outrun(self) -> CheckpointError:
        return CheckpointError(
            f"{self.root}: checkpoints were removed faster than they could be read; keep more of them"
        )


def open_checkpoints(uri: str | os.PathLike[str] | ObjectStore) -> Checkpoints:
    """The checkpoints of the root at `uri` (a path, `file://`, `s3://` or `gs://` URI, or a store), for reading only.

    Claims nothing and creates nothing, so that it can be used while a training runs and on a root that is read-only.

    Raises:
        ValueError: `uri` is no root's address.
        ModuleNotFoundError: a cloud's library is not installed; the message says what to install.
        MissingCheckpointError: there is no root.
        CheckpointError: it cannot be read.
    """
    if not isinstance(uri, str | os.PathLike):
        return Checkpoints(uri)
    try:
        store = open_root(uri)
    except (ValueError, ModuleNotFoundError):
        raise
    except Exception as error:  # Each store's library has its own.
        raise CheckpointError(f"{os.fspath(uri)}: {error}") from error
    return Checkpoints(store)


def check_rank(manifest: Manifest, rank: int) -> None:
    """Make sure that the gang that saved a checkpoint had this rank.

    Raises:
        ValueError: it had not.
    """
    if not 0 <= rank < manifest.world_size:
        ranks = "rank 0 alone" if manifest.world_size == 1 else f"ranks 0 to {manifest.world_size - 1}"
        raise ValueError(f"rank={rank}: {manifest.name} was saved by {ranks}")


def _of_part(part: Part, what: Damage, detail: str) -> Problem:
    return Problem(part.name, part.rank, part.key, what, detail)


def _by_size(manifest: Manifest, sizes: dict[str, int]) -> list[Problem]:
    found = []
    for part in manifest.parts:
        size_bytes = sizes.get(part.key)
        if size_bytes is None:
            found.append(_of_part(part, "missing", f"{part.key} is missing"))
        elif size_bytes != part.size_bytes:
            message = f"{part.key} has {size_bytes:,} bytes instead of {part.size_bytes:,}"
            found.append(_of_part(part, "size", message))
    return found
