"""Positions of samplers: the progress in an epoch of a loader, and replaying a sampler of any class up to it."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from mizzen.checkpoint.errors import StateError
from mizzen.checkpoint.marks import ATOMS, MOST_BYTES
from mizzen.checkpoint.tensors import loaded
from mizzen.integrations.random_numbers import RandomStream, owned, seed_of

_BLOCK = 1 << 14
"""Number of indices that `DrawnSampler` draws at once."""


_MOST_ITEMS = 200_000
"""Longer lists of a sampler are not saved."""
_COMPARED_BYTES = 1 << 20
"""Larger tensors have changed if torch says so; it does not count changes through `tensor.data`."""


class DrawnSampler(Sampler[int]):
    """Draws indices with replacement, like torch's `RandomSampler`. Each block of indices has a seed of its own.

    An iteration can therefore begin at any index without drawing those before.
    """

    def __init__(self, size: int, number: int) -> None:
        """Create a sampler that draws `number` indices of a dataset of `size` samples."""
        self._size = size
        self._number = number
        self._from = (0, 0)

    def begin(self, seed: int, start: int) -> None:
        """Make the next iteration begin with index number `start` of the order that `seed` gives."""
        self._from = (seed, start)

    def __len__(self) -> int:
        """Return the number of indices of a whole epoch."""
        return self._number

    def __iter__(self) -> Iterator[int]:
        seed, start = self._from
        for block in range(start // _BLOCK, -(-self._number // _BLOCK)):
            drawn = torch.Generator().manual_seed(seed_of("block", seed, block))
            indices = torch.randint(self._size, (min(_BLOCK, self._number - block * _BLOCK),), generator=drawn)
            yield from indices[max(0, start - block * _BLOCK) :].tolist()


_INDEPENDENT = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DrawnSampler)


class DataPosition:
    """The position of a training in the data: the epoch, and the number of its samples that were used."""

    saved: tuple[str, ...] = ("seed", "epoch", "position", "steps")
    fixed: tuple[str, ...] = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.position = 0
        """Number of samples of this epoch that all ranks together have used; in `ReplayedSampler`, of batches."""
        self.steps = 0
        """Number of calls of `advance`."""
        self.is_saved = False
        """Whether the state of the loader is read for checkpoints."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return a new generator for `purpose`, seeded by seed and epoch, so that the global generator is not used."""
        return torch.Generator().manual_seed(seed_of(purpose, self.seed, self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. If it is the current epoch, the position is not changed."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def restart(self) -> None:
        """Go to the beginning of the epoch, as before the training."""
        self.position = self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, the epoch, the position and the number of steps."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`.

        Raises:
            StateError: settings that determine the order have changed, so the used samples cannot be determined.
        """
        if missing := [name for name in self.saved if name not in state]:
            raise StateError(f"the saved position lacks {', '.join(missing)}: it is that of another kind of sampler")
        for name in self.fixed:
            if state[name] != getattr(self, name):
                raise StateError(f"the saved sampler has {name} {state[name]}, but this one has {getattr(self, name)}")
        for name in self.saved:
            setattr(self, name, state[name])

    def go_to(self, state: dict[str, Any]) -> None:
        """Go to another position of this process, as before a look at a batch."""
        self.load_state_dict(state)


class ReplayedSampler(DataPosition):
    """The position in a sampler of any class: the number of batches, or of indices without batches.

    After a load the sampler is iterated again up to the position, which loads no data. It draws from a stream of its
    own, seeded by seed and epoch, so that it yields the same again: from the global generators, and from those that it
    owns. Numbers, texts, tensors, arrays and lists among its attributes, such as an epoch or weights, are saved as they
    were when the epoch began, and tensors also as they are now; lists and arrays that its iteration changes, as a
    shuffle in place does, are put back when the iteration ends.
    """

    saved = (*DataPosition.saved, "attributes")

    def __init__(self, sampler: Iterable[Any], seed: int, rank: int) -> None:
        super().__init__(seed)
        self.sampler = sampler
        # Ranks that draw samples at random must not draw the same; other samplers divide what all ranks draw alike.
        self._rank = rank if any(isinstance(one, _INDEPENDENT) for one in _nested(sampler)) else 0
        self.attributes: list[dict[str, Any]] = []
        """The changed attributes of the sampler, and of the samplers within it, when the epoch began."""
        self._initial = [_values(one) for one in _nested(sampler)]
        self._loaded: list[dict[str, Any]] | None = None
        """The tensors that had changed in the epoch of a loaded position, until its iteration resumes."""
        self._tensors: list[dict[str, tuple[Any, int]]] = []
        """The tensors among the attributes when the iteration began, with their versions."""
        self._left: list[dict[str, Any]] | None = None
        """The plain attributes as the last iteration has left them."""

    def __iter__(self) -> Iterator[Any]:
        put_back = self._begin()
        lists = [held for one in _nested(self.sampler) for held in vars(one).values() if _is_list(held)]
        before = [(held, held.copy()) for held in lists]
        seed, position = seed_of("order", self.seed, self.epoch, self._rank), self.position
        stream = RandomStream(seed, owned(self.sampler))
        for one in _nested(self.sampler):
            if isinstance(one, DrawnSampler):
                one.begin(seed, position * getattr(self.sampler, "batch_size", 1))
                position = 0
        try:
            with stream:
                indices = iter(self.sampler)
                deque(islice(indices, position), maxlen=0)
            for content, name, value in put_back:
                content[name] = value
            while True:
                self._left = [_plain(one) for one in _nested(self.sampler)]
                with stream:
                    try:
                        index = next(indices)
                    except StopIteration:
                        self._left = [_plain(one) for one in _nested(self.sampler)]
                        return
                yield index
        finally:
            for held, content in before:
                held[:] = content

    def _begin(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Begin an epoch; or, after a load, set the attributes with which this epoch has begun.

        Returns:
            What to set after the used batches are skipped: the attributes of a sampler, a name and a value.
        """
        loaded, self._loaded, put_back = self._loaded, None, []
        if not self.position:
            self.attributes = self._changed()
        for one, start, now in zip(_nested(self.sampler), self._start(), loaded or (), strict=False):
            content = vars(one)
            for name, value in start.items():
                if _is_tensor(value) or _is_tensor(now.get(name)):
                    put_back.append((content, name, _filled(content.get(name), now.get(name, value))))
                    content[name] = _copy(value)
                elif not _is_equal(content.get(name), value):
                    content[name] = _copy(value)
        self._tensors = [
            {name: (one, one._version) for name, one in vars(each).items() if _is_tensor(one)}
            for each in _nested(self.sampler)
        ]
        return put_back

    def _start(self) -> list[dict[str, Any]]:
        """Return the attributes of each sampler when the epoch began."""
        return [initial | values for initial, values in zip(self._initial, self.attributes, strict=False)]

    def _now(self) -> list[dict[str, Any]]:
        """Return the tensors that have changed since the epoch began."""
        if not self.position:
            return []
        return [
            {
                name: value
                for name, value in vars(one).items()
                if _is_tensor(value) and not (_is_known(value, known.get(name)) or _is_equal(value, start.get(name)))
            }
            for one, start, known in zip(_nested(self.sampler), self._start(), self._tensors, strict=False)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the changed attributes of the sampler at the beginning of the epoch, and now."""
        if not self.position:
            self.attributes = self._changed()
        now = self._now() if self._loaded is None else self._loaded
        return super().state_dict() | ({"now": now} if any(now) else {})

    def _changed(self) -> list[dict[str, Any]]:
        """Return the attributes that differ from those of the new sampler, which other ranks may not share."""
        return [
            {name: value for name, value in _values(one).items() if not _is_equal(value, initial.get(name, one))}
            for one, initial in zip(_nested(self.sampler), self._initial, strict=False)
        ]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position, and the attributes of the sampler.

        Raises:
            StateError: the state is from another seed or kind of sampler.
        """
        now = self._load(state)
        for one, start, later in zip(_nested(self.sampler), self._start(), now, strict=False):
            for name, value in (start | later).items():
                if not _is_equal(vars(one).get(name, one), value):
                    vars(one)[name] = _filled(vars(one).get(name), value)

    def _load(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        super().load_state_dict(state)
        now = state.get("now") or [{} for _ in self.attributes]
        self._loaded = now if self.position else None
        return now

    def go_to(self, state: dict[str, Any]) -> None:
        """Go to another position of this process. Attributes that the script has set after the iteration stay."""
        left, now = self._left, [_plain(one) for one in _nested(self.sampler)]
        self._load(state)
        for one, start in zip(_nested(self.sampler), self._start(), strict=False):
            vars(one).update({name: value for name, value in start.items() if type(value) in ATOMS})
        for one, before, after in zip(_nested(self.sampler), left or (), now, strict=False):
            vars(one).update({name: value for name, value in after.items() if before.get(name, one) != value})

    def advance(self, samples: int) -> int:
        """Record that the training has used one more batch. Return the total number of such steps."""
        del samples
        self.position += 1
        self.steps += 1
        return self.steps


def _nested(sampler: Any) -> list[Any]:
    """Return a sampler and those that it wraps, such as the sampler in a `BatchSampler`."""
    found = [sampler] if hasattr(sampler, "__dict__") else []
    for inner in (found and vars(sampler).values()) or ():
        if isinstance(inner, Sampler) and inner is not sampler:
            found += _nested(inner)
    return found


def _plain(sampler: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(sampler).items() if isinstance(value, int | float | str | bool | None)}


def _values(sampler: Any) -> dict[str, Any]:
    """Return copies of the attributes that are saved."""
    large = {name: copy.copy(value) for name, value in vars(sampler).items() if _is_small_list(value)}
    tensors = {name: value.detach().clone() for name, value in vars(sampler).items() if _is_tensor(value)}
    return _plain(sampler) | large | tensors


def _is_tensor(value: Any) -> bool:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized
    return is_dense and value.nbytes <= MOST_BYTES


def _is_small_list(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= _MOST_ITEMS and all(type(one) in (int, float, str, bool) for one in value)
    return _is_list(value) and value.dtype.kind in "biuf" and value.nbytes <= MOST_BYTES


def _is_known(value: Any, known: tuple[Any, int] | None) -> bool:
    """Return whether a large tensor is the same and has the same version; a small one is compared."""
    return known is not None and value.nbytes > _COMPARED_BYTES and known[0] is value and known[1] == value._version


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)
    if hasattr(one, "dtype"):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    return bool(one == other)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _filled(old: Any, new: Any) -> Any:
    """Return a copy of `new`; tensors that fit are filled in place, because the script may hold them, too."""
    if _is_tensor(new) and _is_tensor(old) and (old.dtype, old.shape) == (new.dtype, new.shape):
        with torch.no_grad():
            return old.copy_(new)
    return _copy(new)


def _is_list(value: Any) -> bool:
    numpy = loaded("numpy")
    return isinstance(value, list) or (numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0)
