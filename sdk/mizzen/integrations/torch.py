"""A sampler and a data loader for torch whose position is saved in checkpoints.

    loader = ResumableLoader(dataset, batch_size=32, shuffle=True)
    checkpointer.track(model=model, optimizer=optimizer, loader=loader)
    step = checkpointer.restore()
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            ...

The order of an epoch depends only on the seed and the epoch. A position counts the samples of all ranks, so a gang of
another size resumes at the same place. All ranks have the same position, so the state of one rank is enough.

If the checkpoint was saved within an iteration, the global random generators are restored when the iteration resumes:
code between `restore()` and the first batch, such as `random_split`, draws what it drew at the first start.
"""

import os
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from mizzen.checkpoint import StateError, rng
from mizzen.integrations.looks import Looks
from mizzen.integrations.prepared import PreparedLoader
from mizzen.integrations.random_numbers import Seeded, WorkerStart, owned, seed_of
from mizzen.integrations.replayed_sampler import DrawnSampler, ReplayedSampler
from mizzen.integrations.resumable_sampler import ResumableSampler
from mizzen.integrations.streams import StreamPosition, stream_of

__all__ = ["ResumableLoader", "ResumableSampler"]


class ResumableLoader(PreparedLoader, DataLoader[Any]):
    """A `DataLoader` with a state: the epoch, and the number of samples that the training has received.

        loader = ResumableLoader(dataset, batch_size=32, shuffle=True)
        loader = ResumableLoader(DataLoader(dataset, batch_sampler=buckets, collate_fn=pad))

    accelerate's `prepare` returns the loader itself. The second form takes over the dataset, the sampler and the
    options of another loader. Its sampler may be of any class; `ReplayedSampler` says what is repeated. An
    `IterableDataset` must have a state; see `mizzen.integrations.streams`.

    Batches that workers have prefetched do not count, so a checkpoint after a step has the position after the batch of
    that step. After a load, the first iteration yields the rest of the epoch (nothing, if the epoch was complete), and
    each later one a whole epoch. The loader itself does not use the global random generator.

    Random numbers in datasets and collators are the same as without an interruption. In the training process they
    continue with the global generators, and with those that the dataset and the collator own. In a worker, these
    generators are seeded for each batch by (seed, epoch, number of the batch, rank).
    """

    def __init__(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """Create a loader. `rank` and `world_size` are as in `ResumableSampler`; `options` are those of `DataLoader`.

        `seed` is 0 by default, or that of the option `generator`. With `sampler` or `batch_sampler`, each rank iterates
        its own sampler, which must choose the rank's samples as in a `DataLoader`.

        Raises:
            ValueError: the dataset is empty or has no length, a number is out of range, or options conflict.
        """
        if isinstance(dataset, DataLoader):
            options = _options_of(dataset) | options
            dataset, batch_size = options.pop("dataset"), options.pop("batch_size")
        is_stream = isinstance(dataset, IterableDataset)
        if not is_stream and not isinstance(dataset, Sized):
            raise ValueError(f"dataset: {type(dataset).__name__} has no length, so its position cannot be saved")
        given = options.pop("generator", None)
        if seed is None:
            seed = 0 if given is None else given.initial_seed()
        rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self._order: ResumableSampler | ReplayedSampler | StreamPosition
        given_sampler: Any = options.get("sampler")
        plain = _shuffles(options.get("sampler"), dataset) if world_size == 1 and not is_stream else None
        if is_stream:
            self._order = stream_of(dataset, seed, rank, batch_size, options)
            dataset = self._order
        elif plain is not None or (options.get("sampler") is None and options.get("batch_sampler") is None):
            shuffle = bool(plain) or shuffle
            options["sampler"] = ResumableSampler(dataset, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
            shuffle = False
        elif type(given_sampler) is RandomSampler and given_sampler.replacement:
            options["sampler"] = DrawnSampler(len(dataset), given_sampler.num_samples)
        init = options.pop("worker_init_fn", None)
        super().__init__(dataset, batch_size, shuffle, generator=torch.Generator().manual_seed(seed), **options)
        self.worker_init_fn = WorkerStart(self.collate_fn, init.then if isinstance(init, WorkerStart) else init)
        if isinstance(self.sampler, ResumableSampler):
            self._order = self.sampler
            self._order.seeds_workers = False
        elif not is_stream:
            self._order = ReplayedSampler(super()._index_sampler, seed, rank)
        self.seed = seed
        self._rank = rank
        self._start = 0
        """The epoch at which a training without a checkpoint begins."""
        self._begun = False
        self._created = False
        """Whether an iterator was created since the last load; it may never have been used."""
        self._within = False
        self._iteration: object = None
        """Identifies the latest iteration."""
        self._resume: rng.HeldGenerators | None = None
        self._others: rng.HeldGenerators | None = None
        """Set if only other loaders wait for the generators; a batch of this one may nevertheless be the first one."""
        self._own: list[Any] | None = None
        """Loaded states of the dataset's and collator's generators, which are set after looks are repeated."""
        self._looks = Looks(self._place, self._go_to)

    @property
    def epoch(self) -> int:
        """The current epoch of the training, from 0."""
        before = self._looks.pending(self._within)
        return self._order.epoch if before is None else int(before[0]["epoch"])

    @property
    def used(self) -> int:
        """Number of batches of the current epoch that the training has received: `enumerate(loader, loader.used)`."""
        before = self._looks.pending(self._within)
        state, begun = before[:2] if before is not None else (self._order.state_dict(), self._begun)
        if begun and not self._within:
            return 0  # An epoch that was left early is over.
        size = self._order.world_size * (self.batch_size or 1) if isinstance(self._order, ResumableSampler) else 1
        return -(-int(state["position"]) // size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. If it is the current epoch, nothing changes."""
        self._looks.undo()
        self._start = epoch
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._looks.undo()
        # As in `zip`: another loader has resumed and ended, and the iterator that was created here was not used.
        passed = self._created and self._resume is not None and self._resume.is_set
        self._created = True
        return self._batches(passed)

    def _batches(self, passed: bool) -> Iterator[Any]:
        order, iteration = self._order, object()
        self._looks.begin(self._begun and bool(order.position))
        # An epoch that was left early is over, but a loaded position within an iteration is resumed.
        if (self._begun or passed) and order.position:
            order.set_epoch(order.epoch + 1)
        self._begun = self._within = True
        self._iteration = iteration
        self.generator.set_state(order.generator("workers").get_state())
        if isinstance(order, StreamPosition):
            order.begin()
        is_empty = True
        try:
            if self.num_workers and not self._looks.is_repeated:
                self._restore_data()
            batches = super().__iter__()
            if not self._looks.is_repeated:
                self._restore_generators()
            with self._handing_over() as hand_over:
                for batch in batches:
                    if isinstance(order, StreamPosition):
                        batch = order.unpacked(batch)
                    order.advance(self.batch_size or 1)
                    is_empty = False
                    yield hand_over(batch, self._is_last)
                    if self._iteration is not iteration:
                        raise StateError(
                            "a newer iteration of this ResumableLoader has begun, so this one cannot continue: a "
                            "loader has one position. Use a second loader for the other iteration, and track it too"
                        )
                    self._looks.go_on()
        finally:
            # An older iterator may be freed only now.
            self._within = self._within and self._iteration is not iteration
        if is_empty:
            self._looks.before = None  # The rest of a resumed epoch, not a look.
        self._looks.is_complete = True
        order.set_epoch(order.epoch + 1)

    def _is_last(self) -> bool:
        """Return whether the training has the last batch of an epoch; False if that is not known, as for a stream."""
        order = self._order
        if isinstance(order, StreamPosition):
            return False
        try:
            if isinstance(order, ReplayedSampler):
                return order.position >= len(self)
        except TypeError:  # A batch sampler need not have a length.
            return False
        batch = order.world_size * (self.batch_size or 1)
        return order.position + (batch if self.drop_last else 1) > order.total

    def _place(self) -> tuple[Any, ...]:
        held = self._resume
        return self._order.state_dict(), self._begun, self._created, self._within, held, held and held.is_set

    def _go_to(self, place: tuple[Any, ...]) -> None:
        state, self._begun, self._created, self._within, self._resume, is_set = place
        self._order.go_to(state)
        self._iteration = None
        if self._resume is not None:
            self._resume.is_set = is_set

    def watch_training(self, has_trained: Callable[[], bool | None], mark: Callable[[], Any]) -> None:
        """Use two functions to tell the training from a look at a batch.

        Args:
            has_trained: returns whether the training has begun; None: not known.
            mark: returns a value that differs after each step; None: not known.
        """
        self._looks.has_trained, self._looks.mark = has_trained, mark

    def begin_training(self) -> None:
        """Begin a training without a checkpoint: iterations before it, such as a look at a batch, do not count."""
        self._looks.expect([], None, None)
        if self._begun:
            self._restart()
        self._begun = False

    def _restart(self) -> None:
        self._order.set_epoch(self._start)
        self._order.restart()

    @property
    def _index_sampler(self) -> Any:
        # DataLoader's iterators take from here what they fetch or send to workers.
        if isinstance(self._order, StreamPosition):
            return super()._index_sampler
        rank = self._rank if self.num_workers else None
        return _Indices(super()._index_sampler, self._order, self.batch_size or 1, rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training in the data, and the states of the dataset's and collator's generators.

        `within` says whether an iteration is going on; only then does the next one restore the global generators.
        """
        self._looks.check()
        self._order.is_saved = True
        own = [read() for read, _ in self._generators()] if self._own is None else self._own
        order, within = self._order.state_dict(), self._within
        looks = self._looks.saved(within)
        if (before := self._looks.pending(within)) is not None:
            order, _, _, within, *_ = before
        single, line = self._looks.is_single(within), self._looks.line if within else ""
        return order | {"within": within, "generators": own, "looks": looks, "single": single, "line": line}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`. The next iteration resumes there.

        Raises:
            StateError: the state is from a dataset of another size, or from another seed.
        """
        looks, now = state.get("looks") or [], self._order.state_dict()
        if looks:
            self._restart()
        first = self._order.state_dict(), False, False, False, None, None
        epoch = first
        try:
            self._order.load_state_dict(state)
            if looks:
                loaded = self._order.state_dict()
                self._order.restart()
                epoch = self._order.state_dict(), *first[1:]
                self._order.load_state_dict(loaded)
        except StateError:
            self._order.load_state_dict(now)
            raise
        self._within = state["within"]
        self._begun = not self._within  # An epoch that was left early is over.
        self._created = False
        self._iteration = None
        self._looks.expect(looks, first, epoch, state.get("line", ""))
        self._looks.single, self._looks.trains_within = state.get("single", False), self._within
        self._own = state["generators"]
        if not looks:
            self._restore_own()

    def _restore_own(self) -> None:
        for (_, write), own in zip(self._generators(), self._own or (), strict=False):
            write(own)
        self._own = None

    def leave(self) -> None:
        """End the iteration whose position was loaded: the next one is another epoch."""
        self._begun, self._within = True, False

    def resume_generators(self, held: rng.HeldGenerators) -> bool:
        """Call `held`, which sets the global generators, when the iteration resumes.

        Returns:
            False if the loaded state is not within an iteration, and has no looks. Then `held` is not called.
        """
        waits = bool(self._within or self._looks.awaited)
        self._resume, self._others = (held, None) if waits else (None, held)
        return waits

    def _restore_data(self) -> None:
        """Restore the attributes of the data before workers copy them; the generators are restored after that."""
        for held in (self._resume, self._others):
            if held is not None and not (held.is_set and self._looks.has_trained()):
                held.also()

    def _restore_generators(self) -> None:
        resume, self._resume = self._resume, None
        if self._others is not None:
            if self._others.by is self and self._looks.has_trained() is False:
                self._others.is_set = False
            if not self._others.is_set:
                self._others.by = self
                self._others()
        if resume is not None:
            # A look at another loader has set them.
            resume.is_set = resume.is_set and (resume.by is None or self._looks.has_trained() is not False)
            resume()
        if self._own is not None:
            self._restore_own()

    def _generators(self) -> list[rng.Access]:
        found = owned(self.dataset, self.collate_fn)
        return [access for one in found if (access := rng.generator(one)) is not None]


class _Indices:
    """Yields the indices of a loader's sampler; for workers, with the seed of each batch."""

    def __init__(
        self, sampler: Any, order: ResumableSampler | ReplayedSampler, size: int, worker_rank: int | None
    ) -> None:
        # Without a reference to the loader, which holds its iterator, so that both are freed at once.
        self.sampler = sampler
        self.order = order
        self.size = size
        self.worker_rank = worker_rank

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        order, epoch = self.order, self.order.epoch
        indices: Any
        if isinstance(order, ReplayedSampler):
            indices, place, size = order, order.position, 1
        else:
            indices, place, size = self.sampler, order.position // order.world_size, self.size
        for index in indices:
            key = ("batch", order.seed, epoch, place, self.worker_rank)
            yield index if self.worker_rank is None else Seeded(index, seed_of(*key))
            place += size


def _shuffles(sampler: Any, dataset: Sized) -> bool | None:
    """Return whether one of torch's own samplers shuffles all of a dataset, or takes it in order; None for others."""
    if type(sampler) is SequentialSampler and len(sampler) == len(dataset):
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset):
        return True
    return None


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options that create a loader like `loader`."""
    names = ["dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"]
    names += ["prefetch_factor", "persistent_workers", "pin_memory_device", "in_order", "multiprocessing_context"]
    found = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader.batch_sampler is not None and loader.batch_size is None:
        return found | {"batch_size": 1, "batch_sampler": loader.batch_sampler}
    return found | {"batch_size": loader.batch_size, "sampler": loader.sampler, "drop_last": loader.drop_last}
