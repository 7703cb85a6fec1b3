"""Reproduces the random numbers of a framework's own data loader after a restart.

transformers' Trainer skips the used batches of a resumed epoch, and fetches a batch before the training of the previous
one. When it saves, the random numbers of the next batch are therefore drawn already. `Fetches` keeps the states that
the random generators had before the fetch of each batch that is not used yet, and sets them again before these fetches.
Batches that workers make are seeded by their number, as in a `ResumableLoader`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mizzen.checkpoint import parts, rng
from mizzen.integrations import random_numbers
from mizzen.integrations.random_numbers import Seeded, owned, seed_of
from mizzen.integrations.trainer_position import check_length

_PART = "fetches"


class Fetches:
    """Tracks the fetches of one loader, epoch by epoch."""

    def __init__(self, seed: int, rank: int) -> None:
        self._key = (seed, rank)
        self._epoch = 0
        self._accumulated = 1
        self._length = 1
        self._nothing = False
        self._iterator: _BaseDataLoaderIter | None = None
        self._awaited = False
        self._number = 0
        self._used = 0
        """Number of batches of this epoch that the training has used."""
        self._own: list[Any] = []
        """The generators that dataset and collator own, if batches are made in this process."""
        self._order: Any = None
        """The states before the sampler drew the order of this epoch."""
        self._before: dict[int, Any] = {}
        """The states before the fetch of each batch that is not used yet, by its number."""
        self._loaded: dict[str, Any] | None = None
        self._plan: dict[int, Any] = {}
        self._plain: Callable[[Any], Any] | None = None

    def count(self, accumulated: int, length: int, epoch: int) -> None:
        """Begin at `epoch`. A step uses `accumulated` batches, and the Trainer counts `length` steps as an epoch."""
        self._accumulated, self._length, self._epoch = accumulated, length, epoch

    def install(self) -> None:
        """Start tracking. `remove` ends it."""
        if self._plain is not None:
            return
        plain = self._plain = _BaseDataLoaderIter._next_index

        def next_index(iterator: _BaseDataLoaderIter) -> Any:
            if self._awaited:
                # The training's iterator is the first one that is used after the epoch has begun.
                self._iterator, self._awaited = iterator, False
                return self._first(iterator, plain)
            return self._next(iterator, plain) if iterator is self._iterator else plain(iterator)

        _BaseDataLoaderIter._next_index = next_index

    def remove(self) -> None:
        """Stop tracking."""
        if self._plain is not None:
            _BaseDataLoaderIter._next_index = self._plain
        self._plain = self._iterator = None
        self._awaited = False
        random_numbers.collator = None

    def load(self, path: Path) -> int:
        """Load the states of the epoch that is resumed. Return the number of its batches that were used.

        Raises:
            CheckpointError: the file is damaged.
        """
        self._loaded = _read(path)
        check_length(self._loaded["length"], self._length)
        return int(self._loaded["used"])

    def save(self, path: Path) -> None:
        """Write the states to `path`."""
        ahead = [[number, state] for number, state in self._before.items() if number >= self._used]
        state = {
            "length": self._length,
            "counted": self._epoch * self._length + self._used // self._accumulated,
            "used": self._used,
            "order": self._order,
            "ahead": ahead,
            "next": self._number,
            "now": _states(self._own),
        }
        _, chunks = parts.encode(_PART, state | {"devices": _devices()})
        path.write_bytes(b"".join(chunks))

    def begin(self, collate: Any, nothing: bool) -> None:
        """Await the iterator of an epoch. If it is the one that is resumed, `load` was called before.

        `nothing`: the training is complete, so no batch follows the used ones.
        """
        loaded, self._loaded = self._loaded, None
        self._iterator, self._awaited, self._nothing = None, True, nothing
        self._number, self._used, self._order, self._before, self._plan = 0, 0, None, {}, {}
        random_numbers.collator = collate
        if getattr(collate, "generator", self) is None and getattr(collate, "seed", None) is not None:
            collate.create_rng()  # transformers' own collators would create it at the first batch.
        if loaded is None:
            return
        self._plan = dict(loaded["ahead"])
        self._plan[loaded["next"]] = loaded["now"] | {"devices": loaded["devices"]}
        if loaded["used"]:
            self._used, self._order = loaded["used"], loaded["order"]
        else:
            # The framework restores the global generators before it iterates.
            self._plan[0]["shared"] = None

    def use(self) -> None:
        """Record that the training has used the batches of one more step."""
        self._used += self._accumulated
        self._before = {number: states for number, states in self._before.items() if number >= self._used}

    def end(self) -> None:
        """End the epoch: later saves store the beginning of the next epoch."""
        self._set_rest()  # A stream may end before the last fetch that was awaited.
        self._epoch += 1
        self._number, self._used, self._order, self._before = 0, 0, None, {}

    def _first(self, iterator: _BaseDataLoaderIter, plain: Callable[[Any], Any]) -> Any:
        # The sampler draws the order of the epoch now, and skips what was used.
        if self._order is not None:
            _set(self._order, None)
        else:
            self._order = _states(None)
        if not isinstance(iterator._dataset, IterableDataset):
            self._number = self._used
        return self._next(iterator, plain)

    def _next(self, iterator: _BaseDataLoaderIter, plain: Callable[[Any], Any]) -> Any:
        number, worked = self._number, iterator._num_workers > 0
        if self._nothing and number >= self._used:
            raise StopIteration
        self._own = [] if worked else owned(iterator._dataset, iterator._collate_fn)
        try:
            index = plain(iterator)
        except StopIteration:
            self._set_rest()
            raise
        if number in self._plan:
            _set(self._plan.pop(number), self._own)
        if worked:
            if number >= self._used:
                self._set_rest()
            index = Seeded(index, seed_of("batch", *self._key, self._epoch, number))
        if number >= self._used:
            self._before[number] = _states(self._own)
        self._number = number + 1
        return index

    def _set_rest(self) -> None:
        """Set the latest of the loaded states: this process fetches no other batch before the training continues."""
        for states in self._plan.values():
            _set(states, self._own)
        self._plan = {}


def steps_counted(path: Path) -> int | None:
    """Return the number of steps from which the Trainer derives the place that was saved; None without a file."""
    return int(_read(path)["counted"]) if path.exists() else None


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = parts.decode(parts.TENSORS, bytearray(path.read_bytes()), False, name=_PART)
    return state


def _states(own: list[Any] | None) -> dict[str, Any]:
    """Return the states of the global random number generators, without those of GPUs, and of those in `own`."""
    states = [access[0]() for one in own or () if (access := rng.generator(one)) is not None]
    return {"shared": rng.capture_shared(devices=False), "own": states}


def _set(states: dict[str, Any], own: list[Any] | None) -> None:
    if states["shared"] is not None:
        rng.restore_shared(states["shared"])
    for one, state in zip(own or (), states["own"], strict=False):
        access = rng.generator(one)
        if access is not None:
            access[1](state)
    devices = states.get("devices", ())
    for number, state in enumerate(devices):
        torch.cuda.set_rng_state(state, number if len(devices) > 1 else torch.cuda.current_device())


def _devices() -> list[Any]:
    """Return the states of this process's GPUs: of all if there is no gang, else of its own."""
    if not torch.cuda.is_initialized():
        return []
    alone = not torch.distributed.is_initialized()
    return torch.cuda.get_rng_state_all() if alone else [torch.cuda.get_rng_state()]
