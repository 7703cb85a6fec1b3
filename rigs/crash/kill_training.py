"""The training that `rigs.crash.kill_loop` kills: small, and determined by its seed and rank.

Its state changes at every step, with random values from its own generator and from the global generators of the
process, and with a shuffled order of the data. One part of the state is constant, so it is stored only once. The
process keeps its present stage (`SaveStage`) in shared memory, which needs no system call and survives a kill.
"""

import hashlib
import mmap
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointSettings,
    CheckpointWarning,
    StaleAttemptError,
    Tracked,
    checkpointer,
    parts,
)
from mizzen.checkpoint.background import Saving
from mizzen.checkpoint.roots import open_root
from mizzen.objects.store import Body, Fetch, ObjectInfo, ObjectStore

SIDE, SLICE, SAMPLES, FIXED_BYTES = 160, 3000, 17, 64 << 10


class SaveStage(IntEnum):
    """The stage of the training in which a process is."""

    STARTING = 0
    CLAIM = 1
    CLAIM_RECORD = 2
    SWEEP = 3
    LOADING = 4
    TRAINING = 5
    SAVE_BEGUN = 6
    PARTS = 7
    SHARD = 8
    MEETING = 9
    RECORD = 10
    COMMITTED = 11
    REMOVAL = 12
    ENDED = 13


WORDS = {
    SaveStage.STARTING: "before the claim",
    SaveStage.CLAIM: "claim, before its record",
    SaveStage.CLAIM_RECORD: "writing the claim's record",
    SaveStage.SWEEP: "claimed, sweeping",
    SaveStage.LOADING: "loading",
    SaveStage.TRAINING: "training, no save",
    SaveStage.SAVE_BEGUN: "save, before any write",
    SaveStage.PARTS: "writing parts",
    SaveStage.SHARD: "writing a rank's shard record",
    SaveStage.MEETING: "waiting for the other ranks",
    SaveStage.RECORD: "writing the checkpoint's record",
    SaveStage.COMMITTED: "committed, before removal",
    SaveStage.REMOVAL: "removing old checkpoints",
    SaveStage.ENDED: "after the training",
}


@dataclass(frozen=True)
class KillJob:
    """The parameters of a training process."""

    seed: int
    root: str
    local: str | None = None
    attempt: int | None = None
    keep: int = 2
    every: int = 3
    """Steps between two saves."""
    steps: int = 30
    background: bool = False
    by_step: bool = False
    """Whether the training uses `Checkpointer.step`; otherwise `save` and `save_async`."""
    rank: int = 0
    world_size: int = 1
    arm: int | None = None
    """Number of the save, from 1, before which the process waits for a signal; 0: it waits before the claim."""
    settle: bool = False
    """Whether the process waits for each background save to end, so that the save can be measured."""
    eager: bool = False
    """An injected fault that the checks must find: a save is acknowledged when it begins."""
    open: Callable[[str | os.PathLike[str]], ObjectStore] = open_root


class KillTraining:
    """The state of the training, and the step that changes it."""

    def __init__(self, seed: int, rank: int) -> None:
        random.seed(seed * 1000 + rank)
        np.random.seed(seed * 1000 + rank)
        self.dice = np.random.default_rng(seed)
        self.model: dict[str, Any] = {"w": self.dice.standard_normal((SIDE, SIDE)), "v": np.zeros((SIDE, SIDE))}
        self.fixed: dict[str, Any] = {"embedding": np.random.default_rng(seed + 1).bytes(FIXED_BYTES)}
        self.data: dict[str, Any] = {"epoch": 0, "left": []}
        self.slice: dict[str, Any] = {"mean": np.zeros(SLICE), "coins": []}
        self._shuffle = random.Random(seed)

    @property
    def tracked(self) -> dict[str, Any]:
        """The tracked objects, by part name."""
        return {
            "model": self.model,
            "fixed": self.fixed,
            "data": self.data,
            "dice": self.dice,
            "shuffle": self._shuffle,
            "slice": self.slice,
        }

    def step(self) -> None:
        """Runs one training step."""
        if not self.data["left"]:
            self.data["left"] = self._shuffle.sample(range(SAMPLES), SAMPLES)
            self.data["epoch"] += 1
        sample = self.data["left"].pop()
        gradient = self.dice.standard_normal((SIDE, SIDE)) * (1 + sample)
        # Changed in place, to detect a background save that does not copy.
        self.model["v"] *= 0.9
        self.model["v"] += gradient
        self.model["w"] -= 0.01 * self.model["v"]
        self.slice["mean"] += 0.1 * np.random.standard_normal(SLICE)
        self.slice["coins"] = [random.random(), *self.slice["coins"][:9]]

    def digest(self) -> str:
        """Returns the SHA-256 of the whole state, computed independently of the code under test."""
        digest = hashlib.sha256()
        for array in (self.model["w"], self.model["v"], self.slice["mean"]):
            digest.update(array.tobytes())
        rest = (self.fixed, self.data, self.slice["coins"], self.dice.bit_generator.state, self._shuffle.getstate())
        digest.update(repr((rest, random.getstate())).encode())
        digest.update(repr(np.random.get_state(legacy=False)["state"]["key"].tolist()).encode())
        return digest.hexdigest()


OWN = frozenset({"slice", "rng"})


def expected(job: KillJob) -> tuple[dict[tuple[int, str], str], str]:
    """Returns the results of an uninterrupted run: SHA-256 of each part by (step, part name), and the final digest."""
    training = KillTraining(job.seed, job.rank)
    tracked = Tracked(training.tracked)
    table = {}
    for step in range(1, job.steps + 1):
        training.step()
        for name, value in tracked.capture(step).items():
            digest = hashlib.sha256()
            for chunk in parts.encode(name, value)[1]:
                digest.update(chunk)
            table[step, name] = digest.hexdigest()
    return table, training.digest()


@dataclass
class Channel:
    """The connection of a process with its supervisor."""

    out: int
    back: int
    place: mmap.mmap
    """First byte: the `SaveStage`; second byte: 1 while the stage concerns the local root."""

    def say(self, line: str) -> None:
        """Sends one line, which the supervisor receives even if the process is killed afterwards."""
        os.write(self.out, line.replace("\n", "\\n").encode() + b"\n")

    def meet(self, line: str) -> None:
        """Sends a line, and waits for the signal to continue."""
        self.say(line)
        os.read(self.back, 1)

    def at(self, place: SaveStage, local: bool = False) -> None:
        """Records the current stage."""
        self.place[:2] = bytes((place, local))


@dataclass
class Watched(ObjectStore):
    """A store that records the current operation as the stage of the process."""

    inner: ObjectStore
    channel: Channel
    local: bool
    saving: Callable[[], bool]
    """Returns whether the present operation belongs to a save; otherwise it belongs to a claim or a load."""
    _done: set[SaveStage] = field(default_factory=set)

    def _at(self, claiming: SaveStage, saving: SaveStage) -> None:
        self.channel.at(saving if self.saving() else claiming, self.local)

    def put(self, key: str, body: Body) -> None:
        """See `ObjectStore.put`."""
        shard = key.startswith("shards/")
        copy = key.endswith("/manifest.json")
        stage = SaveStage.COMMITTED if copy else SaveStage.SHARD if shard else SaveStage.PARTS
        self._at(SaveStage.LOADING, stage)
        self.inner.put(key, body)
        if shard:
            self._at(SaveStage.LOADING, SaveStage.MEETING)

    def create(self, key: str, body: bytes) -> bool:
        """See `ObjectStore.create`."""
        self._at(SaveStage.CLAIM_RECORD, SaveStage.RECORD)
        made = self.inner.create(key, body)
        if made:
            self._at(SaveStage.SWEEP, SaveStage.COMMITTED)
        return made

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        if key.startswith("shards/"):
            self._at(SaveStage.LOADING, SaveStage.MEETING)
        return self.inner.get(key)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `ObjectStore.get_range`."""
        return self.inner.get_range(key, start, end)

    def opened(self, key: str) -> AbstractContextManager[Fetch]:
        """See `ObjectStore.opened`."""
        return self.inner.opened(key)

    def stat_all(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """See `ObjectStore.stat_all`."""
        return self.inner.stat_all(keys)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        return self.inner.list(prefix, after=after)

    def size(self, key: str) -> int | None:
        """See `ObjectStore.size`."""
        return self.inner.size(key)

    def stat(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.stat`."""
        return self.inner.stat(key)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._at(SaveStage.SWEEP, SaveStage.REMOVAL)
        self.inner.delete(key)

    def forget(self, key: str) -> None:
        """See `ObjectStore.forget`."""
        self.inner.forget(key)

    def tidy(self) -> None:
        """See `ObjectStore.tidy`."""
        self.inner.tidy()

    def uri(self, key: str) -> str:
        """See `ObjectStore.uri`."""
        return self.inner.uri(key)


def train(job: KillJob, channel: Channel) -> None:
    """Trains to the end, or until the kill. Sends errors and warnings as `violation`, a newer attempt as `stale`."""

    def warned(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, CheckpointWarning):
            channel.say(f"violation a warning: {message}")

    warnings.simplefilter("always")
    warnings.showwarning = warned  # type: ignore[assignment]  # `warned` accepts all arguments.
    try:
        _Trainer(job, channel).run()
    except StaleAttemptError as error:
        channel.say(f"stale {error}")
    except BaseException:
        channel.say(f"violation {traceback.format_exc()}")


class _Trainer:
    def __init__(self, job: KillJob, channel: Channel) -> None:
        self.job, self.channel = job, channel
        self.training = KillTraining(job.seed, job.rank)
        self.saves = 0
        self.saving = False
        self.handle: Saving | None = None
        self.unsettled: int | None = None
        """Step of the background save that is not acknowledged yet."""

    def _open(self, uri: str | os.PathLike[str]) -> ObjectStore:
        return Watched(self.job.open(uri), self.channel, uri == self.job.local, lambda: self.saving)

    def run(self) -> None:
        """Runs the training; see `train`."""
        job, channel = self.job, self.channel
        if job.arm == 0:
            channel.meet("began")
        else:
            channel.say("began")
        channel.at(SaveStage.CLAIM)
        setattr(checkpointer, "open_root", self._open)  # noqa: B010  # That module only imports the name.
        kept = Checkpointer(
            job.root,
            local=job.local,
            background=job.background,
            attempt=job.attempt,
            keep=job.keep,
            interval_s=0,
            settings=CheckpointSettings(sharded=job.world_size > 1, rank=job.rank, world_size=job.world_size),
        )
        if kept.writer:
            # If the attempt has no number, the claim would otherwise happen in the first save.
            kept.claim()
        channel.say(f"claimed {kept.attempt}")
        channel.at(SaveStage.LOADING)
        own = ("slice",) if job.world_size > 1 else ()
        kept.track(own=own, **self.training.tracked)
        step = kept.restore()
        if kept.skipped:
            channel.say(f"violation skipped checkpoints: {kept.skipped}")
        channel.at(SaveStage.TRAINING)
        channel.meet(f"restored {step}")
        tracked = Tracked(self.training.tracked)
        while step < job.steps:
            self.training.step()
            step += 1
            self._acknowledge()
            if step % job.every == 0 or step == job.steps:
                self._save(kept, tracked, step)
        kept.wait()
        self._acknowledge(ended=True)
        channel.at(SaveStage.ENDED)
        channel.say(f"finished {self.training.digest()}")

    def _save(self, kept: Checkpointer, tracked: Tracked, step: int) -> None:
        if self.job.by_step:
            if step == self.job.steps:
                kept.wait()
            if not kept.should_save(step):
                kept.step(step)  # The previous save is still in progress.
                return
        self.saves += 1
        self.saving = True
        job, channel = self.job, self.channel
        waited = self.handle is None and self.unsettled is None
        if waited:
            channel.at(SaveStage.SAVE_BEGUN)
        if job.arm == self.saves:
            channel.meet(f"save {step}")
        else:
            channel.say(f"save {step}")
        if job.eager:
            channel.say(f"done {step}")
        before, self.unsettled = self.unsettled, step
        if job.by_step:
            kept.step(step)
        elif job.background:
            self.handle = kept.save_async(step, tracked.capture(step), own=OWN)
        else:
            kept.save(step, tracked.capture(step), own=OWN)
        if before is not None:
            # A save begins only after the previous one has ended.
            channel.say(f"done {before}")
        if job.background and job.settle:
            kept.wait()
            self.handle = None
        if not job.background or job.settle:
            self._acknowledge(ended=True)

    def _acknowledge(self, ended: bool = False) -> None:
        if self.handle is not None and self.handle.done:
            ended = self.handle.manifest is not None
            self.handle = None
        if ended and self.unsettled is not None:
            self.channel.at(SaveStage.TRAINING)
            self.channel.say(f"done {self.unsettled}")
            self.unsettled = None


def ranks(job: KillJob) -> list[KillJob]:
    """Returns the jobs of all ranks of a gang."""
    return [replace(job, rank=rank) for rank in range(job.world_size)]


Table = Mapping[tuple[int, str], str]
