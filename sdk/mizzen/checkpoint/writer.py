"""Writes checkpoints to a root: claims, parts, shards of a gang, and commits.

The parts are written first, each under a key that no other save uses. Then the manifest is appended to the log, which
is the commit. In a sharded gang each rank writes its parts and a shard record that lists them; rank 0 waits for all
shard records and commits them in one manifest.
"""

import contextlib
import errno
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError, StaleAttemptError
from mizzen.checkpoint.log import Claimed, Log, claim
from mizzen.checkpoint.lost_records import copy_record
from mizzen.checkpoint.manifest import CheckpointId, Claim, Manifest, Part, Shard, parse
from mizzen.checkpoint.part_reader import verify_part
from mizzen.checkpoint.parts import Chunk, file_name
from mizzen.checkpoint.place import SHARD_TIMEOUT_S, Gang, Retention
from mizzen.checkpoint.presync import Unsent, sample
from mizzen.checkpoint.removal import make_room, make_space, prune, remove, tolerated
from mizzen.checkpoint.save_failures import repeated
from mizzen.objects import checksums
from mizzen.objects.store import MissingObject, ObjectStore
from mizzen.objects.workers import Workers

_SHORTEST_POLL_S = 0.002
_LONGEST_POLL_S = 0.25
_PUTS = 4
"""Parts that are written concurrently."""
_CHECKED_EVERY = 4
"""At every fourth reuse of a part its content is read and its checksum compared; at other reuses only its size."""
_REUSED_AT_MOST = 16
"""Consecutive checkpoints that may reuse a part before it is written again."""

_FULL = {errno.ENOSPC, errno.EDQUOT}

T = TypeVar("T")
Encoded = Mapping[str, tuple[str, Sequence[Chunk]]]
"""Part name to kind and content chunks."""


@dataclass
class Writer:
    """Saves the checkpoints of one process to one root. Created by `open_writer`; not thread-safe."""

    log: Log
    claimed: Claimed
    name: str
    """Unique id of this process in its claims and commits; empty if it does not commit."""
    gang: Gang
    retention: Retention
    algorithm: str
    shard_timeout_s: float = SHARD_TIMEOUT_S
    restored: frozenset[str] = frozenset()
    """URIs of the parts that this process has loaded and verified (`Checkpoint.verified`)."""
    insists: bool = True
    """Whether a rank of a gang repeats a failing write while the other ranks wait for it."""
    _adopted: set[str] = field(default_factory=set)
    """`Manifest.by` of the checkpoints that this writer copied from another root."""
    _samples: dict[str, bytes] = field(default_factory=dict)
    """Some bytes of each part at its last save. If they differ now, the part has changed."""
    _reused: dict[str, int] = field(default_factory=dict)
    """Part name to the number of consecutive checkpoints that have reused its object."""
    _abandoned: int | None = None
    """The step whose save no longer waits for other ranks."""

    @property
    def attempt(self) -> int:
        """The attempt for which this process has claimed the root."""
        return self.claimed.attempt

    @property
    def _store(self) -> ObjectStore:
        return self.log.store

    def _check(self) -> None:
        """Check that the known records hold no claim of a newer attempt, or of a newer process of the same attempt.

        Raises:
            StaleAttemptError: there is such a claim.
        """
        self.log.check(self.attempt)
        if self._rival() is not None:
            message = (
                f"another process has since claimed it as attempt {self.attempt} too; this process may not write there"
            )
            raise StaleAttemptError(f"{self.log.where}: {message}")

    def _rival(self) -> Claim | Manifest | None:
        return self.log.rival(self.claimed, self.name, self._adopted) if self.name else None

    def write(self, step: int, encoded: Encoded, mine: Sequence[str] = (), save: int = 0, begun: int = 1) -> Manifest:
        """Write the parts and commit them as a checkpoint, durably; then remove checkpoints that retention drops.

        If the disk is full, older checkpoints are removed first, down to one that is valid.

        Args:
            step: number of steps done.
            encoded: the parts. Only rank 0 writes the parts that all ranks share.
            mine: names of the parts that belong to this rank alone.
            save: lower bound of the save number. The number is increased if the root has already used it.
            begun: number of saves that this process has started, including failed ones. It must be equal on all ranks,
                because it determines where each rank looks for the shards of the others.

        Raises:
            StaleAttemptError: a newer attempt has claimed the root; nothing was committed.
            CheckpointError: another rank did not write before the timeout, or the log cannot be read.
            Exception: an error of the store; earlier checkpoints are unchanged.
        """
        while True:
            try:
                return self._write(step, encoded, mine, save, begun)
            except OSError as error:
                if error.errno not in _FULL or self.gang.rank:
                    raise
                dropped = make_space(self.log, self.retention)
                if dropped is None:
                    raise
                message = f"{self.log.where}: no space left; {dropped.name} was removed to save step {step}"
                warnings.warn(message, CheckpointWarning, stacklevel=4)

    def _write(self, step: int, encoded: Encoded, mine: Sequence[str], save: int, begun: int) -> Manifest:
        """Try once to write; see `write`."""
        self.log.refresh()
        self._check()
        nonce = os.urandom(4).hex()
        folder = f"parts/a{self.attempt:04d}/step-{step:010d}.r{self.gang.rank:04d}.{nonce}"
        meeting = f"shards/a{self.attempt:04d}/step-{step:010d}.s{begun:06d}/"
        undecided = False
        make_room(self.log, self.retention)
        try:
            written = self._put_parts(step, folder, encoded, mine)
            if not self.gang.rank:
                every = written + self._shards(meeting, step)
                undecided = True
                manifest = self._commit(step, every, save, nonce, encoded)
        except BaseException as error:
            # If it is unknown whether the record was created, keep the parts: the record may name them.
            if not undecided or isinstance(error, StaleAttemptError):
                with tolerated(f"{self.log.where}: the parts of a failed save could not be removed"):
                    remove(self._store, [info.key for info in self._store.list(f"{folder}/")])
            raise
        # From here on, do not remove the parts: a newer attempt may have loaded them and reuse them in its checkpoints.
        if self.gang.rank:
            shard = Shard(self.gang.rank, written).to_bytes()
            self._insist(step, lambda: self._store.put(f"{meeting}r{self.gang.rank:04d}.json", shard))
            return self._committed(step, written)
        with tolerated(f"{self.log.where}: the records of shards could not be removed"):
            remove(self._store, (f"{meeting}r{rank:04d}.json" for rank in range(1, self.gang.world_size)))
        return self._settled(manifest)

    def commit(self, step: int, written: tuple[Part, ...], nonce: str) -> Manifest:
        """Commit parts that other processes have written into the folder of `nonce`; see `write`."""
        return self._settled(self._commit(step, written, 0, nonce, {}))

    def _settled(self, manifest: Manifest) -> Manifest:
        """After a commit, check that it was not fenced, and remove the checkpoints that it replaces."""
        self.log.refresh()
        if self.log.attempt > self.attempt or self._rival() is not None:
            self._withdraw(manifest)
        self._check()
        copy_record(self.log, manifest)
        with tolerated(f"{self.log.where}: old checkpoints could not be removed"):
            prune(self.log, self.retention)
        return manifest

    def abandon(self, step: int) -> None:
        """Make a save of `step` in another thread fail instead of waiting for other ranks, because one has failed."""
        self._abandoned = step

    def unsent(self, encoded: Encoded, mine: Collection[str] = ()) -> dict[str, Unsent]:
        """Return the parts that `write` would write now. Compares only samples, so it is cheap.

        `mine`: names of the parts that belong to this rank alone.
        """
        found = {}
        for name, (_, chunks) in encoded.items():
            if self.gang.rank and name not in mine:
                continue
            size_bytes = sum(memoryview(chunk).nbytes for chunk in chunks)
            sampled = sample(chunks, size_bytes)
            if self._samples.get(name) != sampled or self._reused.get(name, 0) >= _REUSED_AT_MOST:
                found[name] = Unsent(size_bytes, sampled)
        return found

    def _insist(self, step: int, write: Callable[[], T]) -> T:
        """Call `write`. In a gang, repeat it after errors of the store as long as other ranks wait for this rank.

        The other ranks would wait until their timeout if this rank gave up.

        Raises:
            StaleAttemptError: a newer attempt has claimed the root.
            Exception: the error of the last try.
        """

        def check() -> None:
            with contextlib.suppress(Exception):
                self.log.refresh()
            self._check()

        limit_s = self.shard_timeout_s if self.gang.world_size > 1 else 0.0
        return repeated(write, limit_s, lambda _: self.insists and self._abandoned != step, check)

    def _put_parts(self, step: int, folder: str, encoded: Encoded, mine: Sequence[str]) -> tuple[Part, ...]:
        newest = self.log.checkpoints[:1]
        before = {(part.name, part.rank): part for _, manifest in newest for part in manifest.parts}
        own = {name for name in encoded if name in mine}
        names = [name for name in encoded if name in own or not self.gang.rank]
        with Workers(_PUTS) as puts, Workers(_PUTS) as digests:

            def put(name: str) -> Part:
                kind, chunks = encoded[name]
                rank = self.gang.rank if name in own else None
                size_bytes = sum(memoryview(chunk).nbytes for chunk in chunks)
                found = digests.submit(checksums.checksum, self.algorithm, chunks)
                sampled = sample(chunks, size_bytes)
                known = before.get((name, rank))
                like = known is not None and known.size_bytes == size_bytes and self._is_like(known, sampled)
                # If size and sample match, compare the checksum; an unchanged part is not written again.
                if known is not None and like and (known.kind, known.checksum) == (kind, found.result()):
                    self._samples[name], self._reused[name] = sampled, self._reused.get(name, 0) + 1
                    if self._is_sound(known, self._reused[name]):
                        return Part(name, known.key, kind, size_bytes, known.checksum, rank)
                self._samples[name], self._reused[name] = sampled, 0
                key = f"{folder}/{file_name(name, kind)}"
                self._insist(step, lambda: self._store.put(key, chunks))
                return Part(name, key, kind, size_bytes, found.result(), rank)

            return tuple([done.result() for done in [puts.submit(put, name) for name in names]])

    def _is_like(self, part: Part, sampled: bytes) -> bool:
        """Return whether a stored part may equal the part's current content, of which `sampled` is a sample.

        Before the first save there is no earlier sample. Then only parts that were loaded and verified can be reused.
        """
        before = self._samples.get(part.name)
        return self._store.uri(part.key) in self.restored if before is None else before == sampled

    def _is_sound(self, part: Part, reused: int) -> bool:
        """Return whether a new checkpoint may reuse this existing part; `reused` counts its consecutive reuses.

        A damaged part is written again, and so is a part that was reused often: otherwise one flipped bit could make
        every checkpoint unloadable. If the store cannot be read, the part counts as damaged.
        """
        if reused > _REUSED_AT_MOST:
            return False
        try:
            if reused % _CHECKED_EVERY == 0:
                verify_part(self._store, part)
                return True
            return self._store.size(part.key) == part.size_bytes
        except Exception:
            return False

    def _shards(self, meeting: str, step: int) -> tuple[Part, ...]:
        """Wait for the shard records of all other ranks, and return their parts."""
        missing = set(range(1, self.gang.world_size))
        found: dict[int, tuple[Part, ...]] = {}
        for _ in self._until(step, lambda: f"rank {min(missing)} has not written its shard {meeting}"):
            for rank in sorted(missing):
                with contextlib.suppress(MissingObject, CorruptCheckpointError):
                    shard = parse(self._store.get(f"{meeting}r{rank:04d}.json"))
                    if isinstance(shard, Shard) and shard.rank == rank:
                        found[rank] = shard.parts
                        missing.remove(rank)
            if not missing:
                break
        return tuple(part for rank in sorted(found) for part in found[rank])

    def _committed(self, step: int, written: tuple[Part, ...]) -> Manifest:
        """Wait until rank 0 has committed this rank's parts, and return the manifest."""
        own = set(written)
        for _ in self._until(step, lambda: f"rank 0 has not committed the checkpoint of step {step}"):
            for _, manifest in self.log.checkpoints:
                if manifest.id.attempt == self.attempt and manifest.step == step and own <= set(manifest.parts):
                    return manifest
        raise AssertionError("unreachable")

    def _until(self, step: int, what: Callable[[], str]) -> Iterator[None]:
        """Yield until the caller breaks or the timeout passes; between two yields sleep and reread the log.

        Raises:
            CheckpointError: the timeout has passed, or the save of `step` was abandoned.
            StaleAttemptError: a newer attempt has claimed the root.
        """
        deadline_s = time.monotonic() + self.shard_timeout_s
        poll_s = _SHORTEST_POLL_S
        while True:
            yield
            if self._abandoned == step:
                raise CheckpointError(f"{self.log.where}: {what()}, and the save has failed on another rank")
            if time.monotonic() > deadline_s:
                raise CheckpointError(f"{self.log.where}: {what()} within {self.shard_timeout_s:g} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            self.log.refresh()
            self._check()

    def _commit(self, step: int, written: tuple[Part, ...], save: int, nonce: str, encoded: Encoded) -> Manifest:
        # A process that was paused while it wrote the parts would otherwise detect the newer attempt only after the
        # commit, and could not remove its parts then.
        self.log.refresh()
        while True:
            self._check()
            identity = CheckpointId(attempt=self.attempt, save=max(save, self.log.next_save), step=step)
            gang, scores = self.gang.world_size, self.retention.scores(encoded)
            manifest = Manifest(identity, round(time.time(), 3), written, gang, nonce, self.name, scores)
            # A repeated `append` with the same record finds what an earlier one has created.
            if self._insist(identity.step, partial(self.log.append, manifest)):
                return manifest
            self.log.advance()

    def adopt(self, source: ObjectStore, manifest: Manifest) -> None:
        """Copy a checkpoint, with its parts, from another root, and commit it here.

        Raises:
            StaleAttemptError: a newer attempt has claimed the root.
            CheckpointError: a part or its copy is damaged.
            Exception: an error of a store.
        """
        from mizzen.checkpoint.root_copy import copy_parts  # rarely needed

        copy_parts(source, self._store, manifest.parts)
        self._adopted.add(manifest.by)
        self.log.refresh()
        while all(known.id != manifest.id for _, known in self.log.checkpoints):
            self._check()
            if not self.log.append(manifest):
                self.log.advance()
        self.log.refresh()
        if self.log.attempt > self.attempt:
            self._withdraw(manifest)
        self._check()
        copy_record(self.log, manifest)
        with tolerated(f"{self.log.where}: old checkpoints could not be removed"):
            prune(self.log, self.retention)

    def _withdraw(self, manifest: Manifest) -> None:
        """Remove the record of this stale writer's save if newer writers removed parts of it or did not see it.

        A writer that was paused can commit under a record number that newer writers have freed. If all its parts still
        exist, the commit may precede the newer claim, and newer checkpoints may reuse the parts: then the record stays,
        and the newer writers remove it by retention. A newer writer of the same attempt has not seen the record if it
        has committed a save number that is not greater.

        Only the record is removed: a newer writer may have loaded it before, and its checkpoints may reuse the parts.
        Parts that no record names are removed by the sweep of the next attempt.
        """
        with tolerated(f"{self.log.where}: the record of a fenced save could not be removed"):
            there = self.log.part_sizes()
            theirs = [known.id for _, known in self.log.checkpoints if known.writer not in ("", self.name)]
            unseen = any(known.attempt == self.attempt and known.save <= manifest.id.save for known in theirs)
            if not unseen and all(part.key in there for part in manifest.parts):
                return
            for number, known in self.log.checkpoints:
                if known.by == manifest.by:
                    self.log.remove(number)


def open_writer(
    store: ObjectStore,
    attempt: int | None,
    gang: Gang,
    retention: Retention,
    algorithm: str | None = None,
    *,
    commits: bool = True,
    at_least: int = 1,
    alone: bool = False,
) -> Writer:
    """Claim the root, and return a writer.

    Args:
        store: the root.
        attempt: fencing token; None for the next free number.
        gang: rank and size of the gang. Only rank 0 commits.
        retention: which checkpoints are kept.
        algorithm: checksum algorithm; None for the fastest that is installed.
        commits: whether this process may commit, if it has rank 0.
        at_least: lower bound of the number if `attempt` is None.
        alone: fail if another process has claimed the root for the same attempt.

    Raises:
        StaleAttemptError: a newer attempt has claimed the root, or (`alone`) another process of the same attempt has.
        CheckpointError: the log cannot be read.
    """
    log = Log(store)
    by = os.urandom(4).hex()
    name = by if commits and not gang.rank else ""
    claimed = claim(log, attempt, by, writer=name, at_least=at_least, alone=alone)
    for entry in log.entries:
        if entry.record is None:
            message = f"{log.where}: record {entry.number} of the log is damaged: {entry.reason}"
            warnings.warn(message, CheckpointWarning, stacklevel=4)
    return Writer(log, claimed, name, gang, retention, algorithm or checksums.fastest())
