"""The random numbers of datasets, collators and samplers: which generators they own, and how these are seeded.

A batch that a worker makes is seeded by its number, so it is the same whichever worker makes it, and after which other
batches. A sampler draws from a stream of its own, so its order depends neither on the training nor on a restart.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import get_worker_info

from mizzen.checkpoint import rng
from mizzen.checkpoint.tensors import loaded

_DEPTH = 4
_ITEMS = 64
"""Longer lists and dicts hold samples, not transforms, and are not searched."""


def seed_of(*key: object) -> int:
    """Return a seed of 63 bits that depends only on `key`."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "little") >> 1


def owned(*values: Any) -> list[Any]:
    """Return the generator objects that datasets, samplers or functions use, in an order that a restart repeats.

    Searched are attributes, short lists and dicts, closures, and the global variables that functions name.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    for value in values:
        for generator in _search(value, _DEPTH, seen):
            found.setdefault(id(generator), generator)
    return list(found.values())


def _search(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if value is None or id(value) in seen or isinstance(value, str | bytes | int | float | torch.Tensor | ModuleType):
        return
    seen.add(id(value))
    if rng.generator(value) is not None:
        if not _is_global(value):
            yield value
        return
    if depth:
        for inner in _parts(value):
            yield from _search(inner, depth - 1, seen)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | dict):
        if len(value) <= _ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # The variable has no value yet.
                continue
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    elif not isinstance(value, type | torch.nn.Module):
        yield from getattr(value, "__dict__", {}).values()
        for name in ("__getitem__", "__getitems__", "__iter__", "__call__"):
            method = getattr(type(value), name, None)
            if isinstance(method, FunctionType):
                yield method


def _is_global(generator: Any) -> bool:
    """Return whether it is one of the global generators, which are part of every checkpoint anyway."""
    numpy = loaded("numpy.random")
    shared = [torch.default_generator, getattr(random, "_inst", None)]
    return any(generator is one for one in [*shared, numpy.mtrand._rand if numpy is not None else None])


def seed_all(seed: int, generators: list[Any]) -> None:
    """Seed the global generators, except those of GPUs, and `generators`, each differently."""
    random.seed(seed)
    if (numpy := loaded("numpy.random")) is not None:
        numpy.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    for number, generator in enumerate(generators):
        _seed(generator, seed_of(seed, number))


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        numpy = loaded("numpy.random")
        if isinstance(generator, numpy.RandomState):
            generator.seed(seed & 0xFFFFFFFF)
        else:
            bits = generator.bit_generator if isinstance(generator, numpy.Generator) else generator
            bits.state = type(bits)(seed).state


class RandomStream:
    """A stream of random numbers: code in a `with` block draws from it, and outside nothing is drawn.

    It replaces the states of the global generators, except those of GPUs, and of `generators`.
    """

    def __init__(self, seed: int, generators: list[Any]) -> None:
        self._seed: int | None = seed
        self._generators = generators
        self._accesses: list[rng.Access] = []
        self._inside: list[Any] = []
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._accesses = [*(access for one in self._generators if (access := rng.generator(one))), *_shared()]
        self._outside = [read() for read, _ in self._accesses]
        if self._seed is None:
            self._put(self._inside)
        else:
            seed_all(self._seed, self._generators)
            self._seed = None

    def __exit__(self, *_: object) -> None:
        self._inside = [read() for read, _ in self._accesses]
        self._put(self._outside)

    def _put(self, states: list[Any]) -> None:
        for (_, write), state in zip(self._accesses, states, strict=False):
            write(state)


def _shared() -> Iterator[rng.Access]:
    """Yield how to read and set the global generators; numpy's is last, because it may be imported later."""
    yield random.getstate, random.setstate
    yield torch.get_rng_state, torch.set_rng_state
    if (numpy := loaded("numpy.random")) is not None:
        yield partial(numpy.get_state, legacy=False), numpy.set_state


class Seeded:
    """An index, or the indices of a batch, for a worker: when the worker receives it, it seeds its generators."""

    def __init__(self, index: Any, seed: int) -> None:
        self.index = index
        self.seed = seed

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, int]]:
        return _received, (self.index, self.seed)


collator: Any = None
"""The collator of a loader without `WorkerStart`, for workers that are forked."""
_in_worker: list[list[Any]] = []
"""In a worker: the generators that its dataset and collator own. Empty until they are searched."""


def _received(index: Any, seed: int) -> Any:
    seed_worker(seed)
    return index


def seed_worker(seed: int) -> None:
    """Seed the generators of this process, if it is a worker."""
    info = get_worker_info()
    if info is not None:
        if not _in_worker:
            _in_worker.append(owned(info.dataset, collator))
        seed_all(seed, _in_worker[0])


class WorkerStart:
    """The `worker_init_fn` of a loader: finds the generators of the worker's copies, and calls the user's function."""

    def __init__(self, collate: Any, then: Callable[[int], object] | None) -> None:
        self.collate = collate
        self.then = then

    def __call__(self, worker: int) -> None:
        """Begin the worker of this number."""
        info = get_worker_info()
        if self.then is not None:
            self.then(worker)
        _in_worker[:] = [owned(info.dataset if info is not None else None, self.collate)]


class SeededIndex(int):
    """An index whose receipt by a worker seeds the worker's generators. In the same process it is a plain index."""

    key: tuple[int, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Seeded(int(self), seed_of("index", *self.key)).__reduce__()
