"""Streams of samples with a position: a `ResumableLoader` resumes them within an epoch without reading twice.

    stream = ShardedStream(paths, read, shuffle=True)
    loader = ResumableLoader(stream, batch_size=32, num_workers=2)

Any `IterableDataset` with `state_dict` and `load_state_dict` can be used, such as those of the library `datasets`.
Workers read ahead of the training, so each batch carries the position of its worker after it.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert, get_worker_info

from mizzen.checkpoint.errors import StateError
from mizzen.integrations.random_numbers import seed_of, seed_worker
from mizzen.integrations.replayed_sampler import DataPosition


class ShardedStream(IterableDataset[Any]):
    """The samples of many shards, such as files: one shard after another, each read by one worker of one rank.

    Its state is the number of the shard and of the sample in it.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any, int], Iterable[Any]],
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Create a stream.

        Args:
            shards: names of the shards.
            read: `read(shard, start)` yields the samples of a shard from number `start` on. It should seek there.
            shuffle: whether the shards of each epoch have an order of their own, given by seed and epoch.
            seed: see `shuffle`.
            rank: number of this process in the gang; by default the variable `RANK`.
            world_size: number of processes in the gang; by default the variable `WORLD_SIZE`.

        Raises:
            ValueError: there are no shards, or `rank` is not in 0 .. `world_size` - 1.
        """
        self.shards = shards
        self.read = read
        self.shuffle = shuffle
        self.seed = seed
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        if not shards:
            raise ValueError("shards: is empty; must have at least one shard")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank}: must be from 0 to world_size - 1, which is {self.world_size - 1}")
        self.epoch = self._shard = self._sample = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.arange(len(self.shards))
        if self.shuffle:
            chosen = torch.Generator().manual_seed(seed_of("shards", self.seed, self.epoch))
            order = torch.randperm(len(self.shards), generator=chosen)
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        mine = order[self.rank * workers + worker :: self.world_size * workers].tolist()
        while self._shard < len(mine):
            for sample in self.read(self.shards[mine[self._shard]], self._sample):
                self._sample += 1
                yield sample
            self._shard, self._sample = self._shard + 1, 0
        self._shard = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings on which it depends."""
        position = {"epoch": self.epoch, "shard": self._shard, "sample": self._sample}
        return {"shards": len(self.shards), "seed": self.seed, "world_size": self.world_size, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position.

        Raises:
            StateError: the number of shards, the seed or the number of ranks has changed.
        """
        for name, now in (("shards", len(self.shards)), ("seed", self.seed), ("world_size", self.world_size)):
            if state[name] != now:
                raise StateError(f"the saved stream has {name} {state[name]}, but this one has {now}")
        self.epoch, self._shard, self._sample = state["epoch"], state["shard"], state["sample"]


class CarriedBatch:
    """A batch, with the stream's position after its last sample."""

    def __init__(self, batch: Any, role: int, state: dict[str, Any]) -> None:
        self.batch = batch
        self.role = role
        """Number of the worker that read it, without the rotation of a resumed epoch."""
        self.state = state

    def pin_memory(self) -> "CarriedBatch":
        """Copy the batch to pinned memory; torch's loader calls this."""
        return CarriedBatch(torch.utils.data._utils.pin_memory.pin_memory(self.batch), self.role, self.state)


class StreamPosition(DataPosition, IterableDataset[Any]):
    """Wraps a stream of samples for a torch loader and its workers, and records how far the training has read it."""

    saved = (*DataPosition.saved, "workers", "last", "states", "start")

    def __init__(self, dataset: Any, seed: int, rank: int, workers: int, batch_size: int | None) -> None:
        super().__init__(seed)
        if not (callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))):
            raise ValueError(
                f"dataset: {type(dataset).__name__} has no state_dict() and load_state_dict(), so its position cannot "
                "be saved; add them, or use ShardedStream of mizzen.integrations.streams"
            )
        self.dataset = dataset
        self.workers = max(workers, 1)
        self._in_workers = workers > 0
        self._rank = rank
        self._batch_size = batch_size or 1
        self.last = self.workers - 1
        """The role (worker number) that made the last batch of this epoch."""
        self.states: dict[int, dict[str, Any]] = {}
        """The position of each role after its last batch of this epoch."""
        self.start: Any = None
        """The state of the dataset at the beginning of the epoch, if this process iterates it."""
        self._role = self._batches = 0
        self._ended = False

    def __len__(self) -> int:
        """Return the length of the dataset, if it has one."""
        return len(self.dataset)

    def begin(self) -> None:
        """Prepare an iteration, before workers are started."""
        if not self.position and not self._in_workers:
            if self.start is not None:  # The iteration before was left early.
                self.dataset.load_state_dict(self.start)
            self.start = copy.deepcopy(self.dataset.state_dict())
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self.epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            # The worker that is asked first continues the role whose turn it is.
            self._role = (info.id + self.last + 1) % self.workers
            object.__setattr__(info, "id", self._role)  # The dataset asks for it; assignments are refused.
        state = self.states.get(self._role)
        self._batches, self._ended = (state["batches"], state["ended"]) if state is not None else (0, False)
        if state is not None:  # Also at the end of an epoch: the dataset may have a state over all epochs.
            self.dataset.load_state_dict(state["dataset"])
        if self._ended:
            return
        samples, number = iter(self.dataset), 0
        while True:
            if info is not None and number % self._batch_size == 0:
                seed_worker(seed_of("stream", self.seed, self.epoch, self._rank, self._role, self._batches))
            try:
                sample = next(samples)
            except StopIteration:
                self._ended = True
                return
            number += 1
            yield sample

    def carried(self, batch: Any) -> CarriedBatch:
        """Return a batch that was collated in this process, together with the position of the stream after it."""
        self._batches += 1
        state = {"batches": self._batches, "ended": self._ended, "dataset": copy.deepcopy(self.dataset.state_dict())}
        return CarriedBatch(batch, self._role, state)

    def unpacked(self, carried: CarriedBatch) -> Any:
        """Record that the training receives a batch, and return the batch."""
        self.last, self.states[carried.role] = carried.role, carried.state
        return carried.batch

    def advance(self, samples: int) -> int:
        """Record that the training has used one more batch. Return the number of calls so far."""
        del samples
        self.position += 1
        self.steps += 1
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. If it is the current epoch, nothing is changed."""
        if epoch != self.epoch:
            self._rewind()
        super().set_epoch(epoch)

    def restart(self) -> None:
        """Go to the beginning of the epoch, as before the training."""
        super().restart()
        self._rewind()

    def _rewind(self) -> None:
        if self._ended:
            self.start = None
        self.last, self.states, self._ended = self.workers - 1, {}, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training. It stays as it is while the training continues."""
        state = {**super().state_dict(), "states": dict(self.states)}
        if not self.position and not self._in_workers and self.start is None:
            state["start"] = copy.deepcopy(self.dataset.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position.

        Raises:
            StateError: the state is of another seed or kind of loader, or of another number of workers in an epoch.
        """
        workers = state.get("workers", self.workers)
        if state.get("position") and workers != self.workers:
            raise StateError(f"the saved epoch was read by {workers} workers; set num_workers={workers} until it ends")
        now = self.workers
        super().load_state_dict(state)
        self.workers, self._ended, self.states = now, False, dict(self.states)
        if not self.position:
            self.last = now - 1


class Carrying:
    """The collator of a loader of a stream: it adds the position after each batch."""

    def __init__(self, collate: Callable[[Any], Any], stream: StreamPosition) -> None:
        self.collate = collate
        self.stream = stream

    def __call__(self, samples: Any) -> CarriedBatch:
        """Make a batch."""
        return self.stream.carried(self.collate(samples))


def stream_of(dataset: Any, seed: int, rank: int, batch_size: int | None, options: dict[str, Any]) -> StreamPosition:
    """Return a wrapper that iterates a stream, and add its collator to the options.

    Raises:
        ValueError: the dataset has no state, or workers should persist, which cannot be informed of later epochs.
    """
    if options.get("persistent_workers"):
        raise ValueError("persistent_workers=True: must be False for a stream, whose workers begin at its position")
    options.pop("sampler", None)
    stream = StreamPosition(dataset, seed, rank, options.get("num_workers", 0), batch_size)
    collate = options.get("collate_fn") or (default_convert if batch_size is None else default_collate)
    options["collate_fn"] = Carrying(collate.collate if isinstance(collate, Carrying) else collate, stream)
    return stream
