"""Finds untracked objects with a state in the variables of a script, to hint at state that a checkpoint omits."""

import sys
from types import FrameType
from typing import Any

from mizzen.checkpoint import rng
from mizzen.checkpoint.tensors import loaded
from mizzen.checkpoint.tracked_objects import Tracked


def untracked(tracked: Tracked) -> list[str]:
    """Return the variables of the function that called the SDK, and of its module, that hold a state.

    Each as `name (class)`: random generators, and objects with `state_dict` and `load_state_dict`.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("mizzen."):
        frame = frame.f_back
    if frame is None:
        return []
    variables = {**frame.f_globals, **frame.f_locals}
    known = {id(part) for one in tracked.objects for part in _modules(one)}
    return [
        f"{name} ({type(value).__name__})"
        for name, value in variables.items()
        if id(value) not in known and not isinstance(value, type) and _has_state(value)
    ]


def _modules(value: Any) -> list[Any]:
    """Return an object, and the modules inside if it is a torch module."""
    torch = loaded("torch")
    return list(value.modules()) if torch is not None and isinstance(value, torch.nn.Module) else [value]


def _has_state(value: Any) -> bool:
    try:
        if rng.generator(value) is not None:
            return True
        return callable(getattr(value, "load_state_dict", None)) and bool(value.state_dict())
    except Exception:
        return False
