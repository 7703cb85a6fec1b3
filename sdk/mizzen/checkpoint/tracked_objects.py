"""Tracks the named objects of a training: captures their states for a checkpoint, and restores them."""

from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

from mizzen.checkpoint import rng
from mizzen.checkpoint.errors import StateError
from mizzen.checkpoint.live_tensors import Live, live_tensors
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

    - a random generator of Python, numpy or torch (`mizzen.checkpoint.rng`);
    - an object with `state_dict()` and `load_state_dict()`: torch modules, optimizers, schedulers, `GradScaler`,
      samplers. A module that is wrapped by `DistributedDataParallel`, `DataParallel` or `torch.compile` is saved
      unwrapped, so that it loads with and without the wrapper;
    - a pair of functions: the first returns the state, the second restores it;
    - a mutable dict, which is updated in place.

    Two parts are always tracked: `rng`, the global random generators, and `progress`, a dict with the `step` and what
    the user adds to it. A tracked dict with the name `progress` replaces the default one.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Track `objects` by name.

        Raises:
            StateError: a name is not a valid part name or is already tracked, or an object is of no supported kind.
        """
        self._parts: dict[str, rng.Access] = {}
        self._modules: dict[str, Any] = {}
        self._held: dict[str, Any] | None = None
        """Loaded states of the global random generators that a tracked loader sets when its iteration resumes."""
        self.progress: MutableMapping[str, Any] = {}
        """The dict that is saved as the part `progress`; `capture` and `restore` set its `step`."""
        self.add(objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track more objects: all of them, or none if one cannot be tracked.

        Raises:
            StateError: see `__init__`.
        """
        added = {name: self._accepted(name, value) for name, value in objects.items()}
        self._modules |= {name: _unwrapped(value) for name, value in objects.items() if name != PROGRESS}
        self._parts |= {name: access for name, access in added.items() if name != PROGRESS}
        if PROGRESS in objects:
            self.progress = objects[PROGRESS]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parts, in the order in which they are saved."""
        return (*self._parts, RNG, PROGRESS)

    def live(self, names: Collection[str]) -> Live:
        """Return, by part, the tensors of tracked modules that a load can fill in place. `names`: the loaded parts.

        Returns none if `names` differ from the tracked parts: `restore` then raises, and must leave the objects
        unchanged.
        """
        if set(names) != set(self.names):
            return {}
        found = {name: live_tensors(name, module) for name, module in self._modules.items()}
        return {name: tensors for name, tensors in found.items() if tensors}

    def capture(self, step: int) -> dict[str, Any]:
        """Return the current state: part name to value. Its tensors are live: save or copy it before the next step."""
        if step != self.progress.get("step"):
            self._held = None  # The training has gone on without the loader that holds them.
        self.progress["step"] = step
        state = {name: _noted(name, "capturing", save) for name, (save, _) in self._parts.items()}
        shared = rng.capture_shared() if self._held is None else self._held
        return state | {RNG: shared, PROGRESS: dict(self.progress)}

    def restore(self, state: Mapping[str, Any], *, extra_ok: bool = False) -> None:
        """Restore each object from its part of a loaded state, in the order of tracking; the random generators last.

        If a tracked loader or sampler was saved within its iteration, it restores the global random generators when the
        iteration resumes (`resume_generators`): what a script draws until then belongs to its start.

        Args:
            state: part name to value.
            extra_ok: whether the state may have parts that are not tracked; they are ignored.

        Raises:
            StateError: a part is missing, or a part is not tracked; nothing was restored. An exception of an object's
                own `load_state_dict` is raised unchanged, with a note that names the part.
        """
        missing = [name for name in self.names if name not in state]
        unknown = [name for name in state if name not in self.names]
        if missing:
            raise StateError(f"the checkpoint lacks the tracked parts {_listed(missing)}; it has {_listed(state)}")
        if unknown and not extra_ok:
            wanted = "track them too, or pass extra_ok=True to ignore them"
            raise StateError(f"the checkpoint has parts that are not tracked, {_listed(unknown)}: {wanted}")
        for name, (_, load) in self._parts.items():
            _noted(name, "restoring", load, state[name])
        _refill(self.progress, state[PROGRESS])
        held: dict[str, Any] = state[RNG]
        self._held = held

        def release() -> None:
            if self._held is held:
                self._held = None
                rng.restore_shared(held)

        methods = [getattr(value, "resume_generators", None) for value in self._modules.values()]
        waiting = [wait(release) for wait in methods if callable(wait)]
        if not any(waiting):
            release()

    def _accepted(self, name: str, value: Any) -> rng.Access:
        check_part_name(name)
        if name == RNG:
            raise StateError(f"part {RNG!r} is always tracked; use another name for your own generators")
        if name in self._parts:
            raise StateError(f"part {name!r} is already tracked")
        if name == PROGRESS and not isinstance(value, MutableMapping):
            raise StateError(f"part {PROGRESS!r}: is a {type(value).__name__}; must be a dict")
        access = _access(value)
        if access is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            wanted = "state_dict() and load_state_dict(), a dict, a pair (save, load), or a random generator"
            raise StateError(f"part {name!r}: {kind} cannot be tracked; use an object with {wanted}")
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
    """Return the module inside its wrappers, such as `DistributedDataParallel`; other values unchanged."""
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
