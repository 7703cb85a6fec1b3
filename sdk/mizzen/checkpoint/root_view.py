"""Read-only access to the checkpoints of a root: `open_checkpoints` lists, verifies and loads them without a claim.

    found = open_checkpoints("s3://bucket/run-7")
    for manifest in found.list():
        print(manifest.step, manifest.size_bytes, found.verify(manifest) or "valid")
    state = found.load(1000).state

Use a `Checkpointer` to train: its claim fences other processes that save. This module can be used while a training
runs, and on a root for which there is only read permission.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from struct import error as StructError
from typing import TypeAlias

from mizzen.checkpoint import tensorfile
from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError, MissingCheckpointError
from mizzen.checkpoint.log import Log, readable
from mizzen.checkpoint.lost_records import is_lost, lost_message
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.checkpoint.part_stream import Damage, DamagedPart, stream
from mizzen.checkpoint.reader import Checkpoint, Reader, Skipped, load_one
from mizzen.checkpoint.roots import open_root
from mizzen.objects.store import ObjectStore

_TRIES = 5
"""Attempts to read a root whose checkpoints are removed while they are read."""

_Content = tuple[str, int, str]
"""Key, size and checksum of a part. A part that several checkpoints share is verified only once."""


@dataclass(frozen=True)
class Problem:
    """A part of a checkpoint that is missing or damaged."""

    part: str
    rank: int | None
    """The rank that the part belongs to; None if all ranks share it."""
    key: str
    """Key of the part, relative to the root."""
    what: Damage
    """`missing`, `size` or `checksum` (differs from what was committed), or `unreadable` (the disk failed)."""
    detail: str
    """The problem as a sentence."""


Problems: TypeAlias = list[Problem]
Judged: TypeAlias = list[tuple[Manifest, Problems]]
_Manifests: TypeAlias = list[Manifest]
_Entries: TypeAlias = list[tensorfile.TensorEntry]


class Checkpoints:
    """Read-only access to the checkpoints of one root. Created by `open_checkpoints`. Every call rereads the log."""

    def __init__(self, store: ObjectStore) -> None:
        """Open the root in `store`.

        Raises:
            MissingCheckpointError: the store holds no root: its log has no records.
            CheckpointError: the log cannot be read.
        """
        self._store = store
        self._log = Log(store)
        self._log.refresh()
        if not self._log.entries:
            if is_lost(self._log):
                raise MissingCheckpointError(lost_message(self.root))
            raise MissingCheckpointError(f"{self.root}: not a checkpoint root (a root has the folders log/ and parts/)")

    @property
    def root(self) -> str:
        """URI of the root."""
        return self._log.where

    @property
    def store(self) -> ObjectStore:
        """The object store that holds the parts."""
        return self._store

    def list(self) -> _Manifests:
        """Return all committed checkpoints, newest first. Their parts may be damaged, see `survey` and `verify`.

        Raises:
            CheckpointError: the log cannot be read.
        """
        self._log.refresh()
        return [manifest for _, manifest in self._log.checkpoints]

    def damaged_records(self, newer_than: Manifest | None = None) -> tuple[Skipped, ...]:
        """Return the damaged records of the log, as of the last call that read it. Each may have been a checkpoint.

        Args:
            newer_than: return only records that are newer than the record of this checkpoint.
        """
        numbers = [number for number, manifest in self._log.checkpoints if manifest == newer_than]
        least = max(numbers, default=0)
        return tuple(
            Skipped(f"record {entry.number} of the log", entry.reason)
            for entry in self._log.entries
            if entry.record is None and entry.number > least
        )

    def get(self, step: int | None = None) -> Manifest:
        """Return the newest checkpoint of `step`; of all steps if `step` is None.

        Raises:
            MissingCheckpointError: there is no such checkpoint. The message lists the steps that exist.
            CheckpointError: the log cannot be read.
        """
        found = self.list()
        for manifest in found:
            if step is None or manifest.step == step:
                return manifest
        if not found:
            raise MissingCheckpointError(f"{self.root}: the root has no committed checkpoint")
        steps = ", ".join(str(one) for one in sorted({manifest.step for manifest in found}))
        raise MissingCheckpointError(f"{self.root}: there is no checkpoint of step {step}; available steps: {steps}")

    def survey(self, *, verify: bool = False) -> Judged:
        """Return all checkpoints, newest first, each with its parts that are missing or have the wrong size.

        Lists the parts. With `verify`, parts of the right size are also read and their checksums compared.

        Raises:
            CheckpointError: the log, the listing of the parts, or a part cannot be read.
        """
        known: dict[_Content, Problem | None] = {}

        def problems_of(manifest: Manifest) -> Problems:
            return _by_size(manifest, sizes) or (self._problems(manifest, known, None) if verify else [])

        for _ in range(_TRIES):
            found = self.list()
            sizes = self._log.part_sizes() if found else {}
            judged = [(manifest, problems_of(manifest)) for manifest in found]
            # A checkpoint that was removed during the survey must not be reported as damaged.
            if not any(problems for _, problems in judged) or {m.id for m in found} <= {m.id for m in self.list()}:
                return judged
        raise self._outrun()

    def verify(
        self, step: int | Manifest | None = None, *, progress: Callable[[int], object] | None = None
    ) -> Problems:
        """Read every part of a checkpoint and compare its checksum. Return the problems; an empty list if it is valid.

        Args:
            step: a manifest, or a step, which selects its newest checkpoint; None for the newest of all steps.
            progress: called with the size in bytes of each piece after it is read.

        Raises:
            MissingCheckpointError: there is no such checkpoint, or it was removed while it was read.
            CheckpointError: a part cannot be read for a reason other than damage.
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
        """Verify all checkpoints, newest first. A part that several checkpoints share is read only once. See `verify`.

        Raises:
            CheckpointError: a part cannot be read for a reason other than damage.
        """
        known: dict[_Content, Problem | None] = {}
        judged = [(manifest, self._problems(manifest, known, progress)) for manifest in self.list()]
        return [(manifest, problems) for manifest, problems in judged if not problems or self._is_there(manifest)]

    def load(self, step: int | Manifest | None = None, rank: int = 0, trusted: bool = False) -> Checkpoint:
        """Load a checkpoint as it was saved by `rank`: the shared parts and the parts of this rank.

        Args:
            step: a manifest, or a step, which selects its newest checkpoint. None for the newest valid checkpoint;
                newer damaged ones are skipped, each with a `CheckpointWarning`.
            rank: the rank whose own parts are loaded.
            trusted: whether parts that were saved as `Pickled` may be loaded. Loading a pickle can run any code.

        Raises:
            ValueError: the gang that saved the checkpoint had no such rank.
            MissingCheckpointError: there is no such checkpoint, or it was removed while it was read.
            CorruptCheckpointError: the checkpoint is damaged; if `step` is None, all checkpoints are.
            CheckpointError: the log or a part cannot be read for another reason.
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
                    message = f"{self.root}: {one.name} is skipped: {one.reason}"
                    warnings.warn(message, CheckpointWarning, stacklevel=2)
                return found
            else:
                reasons = "; ".join(f"{one.name}: {one.reason}" for one in skipped)
                raise CorruptCheckpointError(f"{self.root}: no checkpoint can be loaded: {reasons}")
        raise self._outrun()

    def tensors(self, part: Part) -> _Entries:
        """Return the tensors of a part, in file order; empty if the part is not of kind `tensors`.

        Reads only the header of the file, so the part's checksum is not verified.

        Raises:
            CorruptCheckpointError: the part is missing, or its header is malformed.
            CheckpointError: the part cannot be read for another reason.
        """
        if part.kind != "tensors":
            return []
        with readable(part.key):
            head = self._store.get_range(part.key, 0, tensorfile.LENGTH.size)
        try:
            end = tensorfile.header_end(head, part.size_bytes)
            with readable(part.key):
                text = self._store.get_range(part.key, tensorfile.LENGTH.size, end)
            return tensorfile.header(text, part.size_bytes - end)[1]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StructError) as error:
            raise CorruptCheckpointError(f"{part.key}: the safetensors header cannot be read: {error!r}") from error

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
        return CheckpointError(f"{self.root}: checkpoints were removed faster than they could be read; increase keep")


def open_checkpoints(uri: str | os.PathLike[str] | ObjectStore) -> Checkpoints:
    """Open a root read-only. `uri` is a path, a `file://`, `s3://` or `gs://` URI, or a store.

    Claims nothing and writes nothing, so it can be used while a training runs and with read-only permission.

    Raises:
        ValueError: `uri` is not a valid path or URI.
        ModuleNotFoundError: the cloud's client library is not installed. The message names the package to install.
        MissingCheckpointError: there is no root at `uri`.
        CheckpointError: the root cannot be read.
    """
    if not isinstance(uri, str | os.PathLike):
        return Checkpoints(uri)
    try:
        store = open_root(uri)
    except (ValueError, ModuleNotFoundError):
        raise
    except Exception as error:  # Every client library has its own exception types.
        raise CheckpointError(f"{os.fspath(uri)}: {error}") from error
    return Checkpoints(store)


def list_committed(root: str | os.PathLike[str] | ObjectStore, *, verify: bool = False) -> list[Manifest]:
    """Return the valid checkpoints of `root` (a path, a URI, or a store), newest first; empty if there are none.

    A checkpoint is valid if its record matches its checksum and every part of every rank exists with the right size.
    With `verify`, every part is also read and its checksum compared. Read-only and needs no claim, so an observer such
    as the scheduler can call it.

    Raises:
        ValueError: `root` is not a valid path or URI.
        CheckpointError: the log or a part cannot be read for a reason other than damage.
    """
    try:
        found = open_checkpoints(root)
    except MissingCheckpointError:
        return []
    return [manifest for manifest, problems in found.survey(verify=verify) if not problems]


def check_rank(manifest: Manifest, rank: int) -> None:
    """Check that the gang that saved a checkpoint had this rank.

    Raises:
        ValueError: it did not.
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
