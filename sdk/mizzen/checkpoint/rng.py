"""Random generators: those that libraries share in a process, and objects of one's own.

The part `rng` holds those of the process, each only if its library was imported:

| key | what | how |
| --- | --- | --- |
| `python` | `random.getstate()` | a tuple |
| `numpy` | `numpy.random.get_state(legacy=False)` | a dict with an array |
| `torch` | `torch.get_rng_state()` | a tensor |
| `cuda` | `torch.cuda.get_rng_state_all()`, once CUDA is in use | a list of tensors, one a device |

A library that is loaded later gets its state at the restore only if it was imported before that.
"""

import random
import warnings
from collections.abc import Callable
from typing import Any

from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.tensors import loaded

Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read a state, and how to set it."""


def capture_shared() -> dict[str, Any]:
    """The states of the generators that the process's libraries share."""
    state: dict[str, Any] = {"python": random.getstate()}
    if loaded("numpy.random") is not None:
        state["numpy"] = loaded("numpy.random").get_state(legacy=False)
    torch = loaded("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        # Asked before CUDA is in use, it would be started only to be asked.
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_shared(state: dict[str, Any]) -> None:
    """Set the generators to what `capture_shared` gave; those of libraries that are not imported are left out.

    States of more CUDA devices than there are now are left out too, with a `CheckpointWarning`.
    """
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
        message = f"rng: generators of {len(cuda)} CUDA devices were saved, and there are {devices} here"
        warnings.warn(message, CheckpointWarning, stacklevel=2)
    if devices:
        torch.cuda.set_rng_state_all(cuda[:devices])


def generator(value: Any) -> Access | None:
    """How to read and set the state of a generator object; None if `value` is none that is known.

    Known are `random.Random`, numpy's `Generator`, `BitGenerator` and `RandomState`, and `torch.Generator`.
    """
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy = loaded("numpy.random")
    if numpy is not None:
        bits = value.bit_generator if isinstance(value, numpy.Generator) else value
        if isinstance(bits, numpy.BitGenerator):
            return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
        if isinstance(value, numpy.RandomState):
            return (lambda: value.get_state(legacy=False)), value.set_state
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    return None
