"""Saves and restores random generators: the global ones of Python, numpy and torch, and generator objects.

The part `rng` holds the states of the global generators, each only if its library is imported:

| key | state | stored as |
| --- | --- | --- |
| `python` | `random.getstate()` | a tuple |
| `numpy` | `numpy.random.get_state(legacy=False)` | a dict with an array |
| `torch` | `torch.get_rng_state()` | a tensor |
| `cuda` | `torch.cuda.get_rng_state_all()`, if CUDA is initialized | a list of tensors, one per device |

A restore sets the generator of a library only if the library is imported by then.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import loaded

Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Two functions: one returns a state, the other sets it."""


def capture_shared(*, devices: bool = True) -> dict[str, Any]:
    """Return the states of the global random generators: with `devices`, also those of GPUs."""
    import random  # Not at the start: it takes 4 ms of CPU, and most scripts import it anyway.

    state: dict[str, Any] = {"python": random.getstate()}
    if loaded("numpy.random") is not None:
        state["numpy"] = loaded("numpy.random").get_state(legacy=False)
    torch = loaded("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        # Reading the CUDA state would initialize CUDA.
        if devices and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_shared(state: dict[str, Any]) -> None:
    """Set the global random generators to states from `capture_shared`. Skips libraries that are not imported.

    If the state has more CUDA devices than this process, the additional ones are skipped with a `CheckpointWarning`.
    """
    import random

    random.setstate(state["python"])
    if "numpy" in state and loaded("numpy.random") is not None:
        loaded("numpy.random").set_state(state["numpy"])
    torch = loaded("torch")
    if torch is None or "torch" not in state:
        return
    torch.set_rng_state(state["torch"])
    cuda = state.get("cuda", [])
    devices = torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0
    if len(cuda) > devices:
        message = f"rng: the checkpoint has generators of {len(cuda)} CUDA devices, and this process has {devices}"
        warnings.warn(message, CheckpointWarning, stacklevel=2)
    if devices:
        torch.cuda.set_rng_state_all(cuda[:devices])


def spare_persistent_workers() -> None:
    """Make a loader with persistent workers, but without a generator, draw its base seed without a trace.

    It draws one number from the global generator when its workers start: once in a training, but also after each
    restart, within the restored numbers.
    """
    data, torch = loaded("torch.utils.data.dataloader"), loaded("torch")
    if data is None or hasattr(data._BaseDataLoaderIter, "_mizzen_spares"):
        return
    create = data._BaseDataLoaderIter.__init__

    def created(iterator: Any, loader: Any) -> None:
        is_spared = loader.persistent_workers and loader.generator is None
        before = torch.get_rng_state() if is_spared else None
        create(iterator, loader)
        if before is not None:
            torch.set_rng_state(before)

    data._BaseDataLoaderIter.__init__ = created
    data._BaseDataLoaderIter._mizzen_spares = True


class HeldGenerators:
    """Loaded states of the global random generators, which the first loader that resumes its iteration sets, once."""

    def __init__(self, state: dict[str, Any], also: Callable[[], None] = lambda: None) -> None:
        """`also` is called when they are set: it restores what the start of a resumed epoch may have changed, too.

        A loader calls `also` before its workers start, too, because they copy the data.
        """
        self.state = state
        self.also = also
        self.is_set = False
        """Whether they were set, or will not be, because the training has gone on without them."""
        self.by: object = None
        """The loader that has set them although it did not wait for them: its iteration may be only a look."""

    def __call__(self) -> None:
        """Set the generators, if this was not done before."""
        if not self.is_set:
            self.is_set = True
            restore_shared(self.state)
            self.also()


def _spawned(bits: Any) -> int:
    return getattr(getattr(bits, "seed_seq", None), "n_children_spawned", 0)


def _state_of(bits: Any) -> dict[str, Any]:
    """Return the state of a generator of numpy, with the number of generators spawned from it."""
    return {**bits.state, "spawned": spawned} if (spawned := _spawned(bits)) else bits.state


def _set_state(bits: Any, state: dict[str, Any]) -> None:
    bits.state = state
    if (missing := state.get("spawned", 0) - _spawned(bits)) > 0:
        bits.seed_seq.spawn(missing)


def generator(value: Any) -> Access | None:
    """Return the functions that read and set the state of a generator object; None if `value` is not a generator.

    Supported are `random.Random`, numpy's `Generator`, `BitGenerator` and `RandomState`, and `torch.Generator`.
    """
    python = loaded("random")
    if python is not None and isinstance(value, python.Random):
        return value.getstate, value.setstate
    numpy = loaded("numpy.random")
    if numpy is not None:
        bits = value.bit_generator if isinstance(value, numpy.Generator) else value
        if isinstance(bits, numpy.BitGenerator):
            return partial(_state_of, bits), partial(_set_state, bits)
        if isinstance(value, numpy.RandomState):
            return (lambda: value.get_state(legacy=False)), value.set_state
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    return None
