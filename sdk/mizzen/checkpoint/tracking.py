"""What a training tracks: named objects whose states make up a checkpoint, and get them back from it."""

from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

from mizzen.checkpoint import rng
from mizzen.checkpoint.errors import StateError
from mizzen.checkpoint.live import Live, live_tensors
from mizzen.checkpoint.manifest import check_part_name
from mizzen.checkpoint.tensors import loaded

RNG = "rng"
PROGRESS = "progress"


class Tracked:
    """A registry of named parts.

        tracked = Tracked({"model": model, "optimizer": optimizer, "progress": {"epoch": 0}})
        tracked.progress["epoch"] = 3
        state = tracked.capture(step)
        tracked.restore(state)

    Each object is one of these, tried in this order:

    - a random generator of Python's, numpy's or torch's (`mizzen.checkpoint.rng`);
    - something with `state_dict()` and `load_state_dict()`: torch's modules, optimizers, schedulers, `GradScaler`,
      samplers. What `DistributedDataParallel`, `DataParallel` or `torch.compile` has wrapped is saved unwrapped, so
      that it loads with and without them;
    - a pair of functions: one without arguments that gives the state, one that takes it;
    - a mutable dict, which is filled in place.

    Two parts are there by themselves: `rng`, the generators that the process's libraries share, and `progress`, a
    dict with the `step` and what the user adds to it. The user's own dict takes that place if it has this name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Track `objects` by name.

        Raises:
            StateError: a name cannot be a part's or is taken, or an object is none of the above.
        """
        self._parts: dict[str, rng.Access] = {}
        self._modules: dict[str, Any] = {}
        self.progress: MutableMapping[str, Any] = {}
        """What is saved as the part `progress`; `step` in it is set by `capture` and `restore`."""
        self.add(objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track more objects. Nothing is added if one of them cannot be.

        Raises:
            StateError: as above, or a name is tracked already.
        """
        added = {name: self._accepted(name, value) for name, value in objects.items()}
        self._modules |= {name: _unwrapped(value) for name, value in objects.items() if name != PROGRESS}
        self._parts |= {name: access for name, access in added.items() if name != PROGRESS}
        if PROGRESS in objects:
            self.progress = objects[PROGRESS]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts, in the order in which they are saved."""
        return (*self._parts, RNG, PROGRESS)

    def live(self, names: Collection[str]) -> Live:
        """The tensors of tracked modules that a load of a checkpoint with these parts can read into, by part.

        None if these are not the parts that are tracked: `restore` refuses them then, and must have changed nothing.
        """
        if set(names) != set(self.names):
            return {}
        found = {name: live_tensors(name, module) for name, module in self._modules.items()}
        return {name: tensors for name, tensors in found.items() if tensors}

    def capture(self, step: int) -> dict[str, Any]:
        """Part name to value, as of now. Tensors in it are the live ones: write or copy them before going on."""
        self.progress["step"] = step
        state = {name: _noted(name, "capturing", save) for name, (save, _) in self._parts.items()}
        return state | {RNG: rng.capture_shared(), PROGRESS: dict(self.progress)}

    def restore(self, state: Mapping[str, Any], *, extra_ok: bool = False) -> None:
        """Give each object its part of a loaded state, in the order of tracking, and at last the generators theirs.

        Args:
            state: part name to value.
            extra_ok: whether the state may have parts that are not tracked.

        Raises:
            StateError: a part is missing, or there is one that is not tracked; nothing was restored. An error of an
                object's own `load_state_dict` is raised as it is, with a note of the part.
        """
        missing = [name for name in self.names if name not in state]
        unknown = [name for name in state if name not in self.names]
        if missing:
            raise StateError(f"the checkpoint has no part {_listed(missing)}; it has {_listed(state)}")
        if unknown and not extra_ok:
            wanted = "track them too, or pass extra_ok=True to leave them out"
            raise StateError(f"the checkpoint has {_listed(unknown)}, which nobody tracks: {wanted}")
        for name, (_, load) in self._parts.items():
            _noted(name, "restoring", load, state[name])
        _refill(self.progress, state[PROGRESS])
        rng.restore_shared(state[RNG])

    def _accepted(self, name: str, value: Any) -> rng.Access:
        check_part_name(name)
        if name == RNG:
            raise StateError(f"part {RNG!r} is tracked by itself; give generators of your own another name")
        if name in self._parts:
            raise StateError(f"part {name!r} is tracked already")
        if name == PROGRESS and not isinstance(value, MutableMapping):
            raise StateError(f"part {PROGRESS!r}: {type(value).__name__} given; it must be a dict")
        access = _access(value)
        if access is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            wanted = "state_dict() and load_state_dict(), a dict, a pair (save, load), or a random generator"
            raise StateError(f"part {name!r}: {kind} cannot be tracked; give something with {wanted}")
        return access


def _access(value: Any) -> rng.Access | None:
    if found := rng.generator(value):
        return found
    inner = _unwrapped(value)
    save, load = getattr(inner, "state_dict", None), getattr(inner, "load_state_dict", None)
    if callable(save) and callable(load):
        return save, load
    match value:
        case (save, load) if callable(save) and callable(load):
            return save, load
    if isinstance(value, MutableMapping):
        return (lambda: dict(value)), (lambda state: _refill(value, state))
    return None


def _unwrapped(value: Any) -> Any:
    """The module inside what wraps it."""
    torch = loaded("torch")
    if torch is None:
        return value
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(value, parallel):
            value = value.module
        elif isinstance(value, torch.nn.Module) and hasattr(value, "_orig_mod"):
            value = value._orig_mod
        else:
            return value


def _refill(target: MutableMapping[Any, Any], content: Mapping[Any, Any]) -> None:
    target.clear()
    target.update(content)


def _noted(name: str, doing: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        error.add_note(f"while {doing} the part {name!r}")
        raise


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"
