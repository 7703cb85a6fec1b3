"""Tracks the named objects of a training: captures their states for a checkpoint, and restores them."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any

from mizzen.checkpoint import parts, rng
from mizzen.checkpoint.attribute_holders import is_plain_object, watched
from mizzen.checkpoint.attributes import ATTRIBUTES, ChangedAttributes
from mizzen.checkpoint.errors import CheckpointWarning, NotYetError, StateError
from mizzen.checkpoint.gradients import FrozenParameters, GradientWatch, TrainingWatch
from mizzen.checkpoint.manifest import check_part_name
from mizzen.checkpoint.module_layout import ModuleLayout, ModuleState, module_layout, quick_layout
from mizzen.checkpoint.optimizers import AddedGroups
from mizzen.checkpoint.refill import Refill
from mizzen.checkpoint.tensors import loaded
from mizzen.checkpoint.verified_part import VerifiedPart

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
    - a mutable dict, which is filled in place, with its inner dicts, lists, arrays and tensors (`refill`);
    - another object of a class of the script, whose attributes are saved (`ChangedAttributes`).

    Two parts are always tracked: `rng`, the global random generators, and `progress`, a dict with the `step` and what
    the user adds to it. A tracked dict with the name `progress` replaces the default one.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Track `objects` by name.

        Raises:
            StateError: a name is not a valid part name or is already tracked, or an object is of no supported kind.
        """
        self._parts: dict[str, rng.Access] = {}
        self._given: list[Any] = []
        self._modules: dict[str, Any] = {}
        """The tracked objects, without wrappers."""
        self._gradients = GradientWatch()
        self._frozen = FrozenParameters()
        self._added = AddedGroups()
        self._attributes = ChangedAttributes()
        self._loaded_attributes: Mapping[str, Any] = {}
        self._sizes: dict[str, int] = {}
        """Number of entries of each module at the restore."""
        self.tells_changes = True
        """Whether to warn, once, of a part whose entries the training changes."""
        self._training = TrainingWatch()
        self._held: rng.HeldGenerators | None = None
        """Set when a tracked loader resumes its iteration."""
        self._captures = False
        self.has_stepped = False
        """Whether the training has reported a step to this process's `Checkpointer`."""
        self.progress: MutableMapping[str, Any] = {}
        """The dict that is saved as the part `progress`; `capture` and `restore` set its `step`."""
        self.add(objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Track more objects: all of them, or none if one cannot be tracked.

        Raises:
            StateError: see `__init__`.
        """
        added = {name: self._accepted(name, value) for name, value in objects.items()}
        self._given += objects.values()
        self._modules |= {name: _unwrapped(value) for name, value in objects.items() if name != PROGRESS}
        self._parts |= {name: access for name, access in added.items() if name != PROGRESS}
        if PROGRESS in objects:
            self.progress = objects[PROGRESS]
        for watch in _methods(objects.values(), "watch_training"):
            watch(
                lambda: self.has_stepped or self._training.has_trained(self._modules.values()),
                lambda: self._training.mark(self._modules.values(), self.has_stepped),
            )
        for watch in _methods(objects.values(), "watch_steps"):
            watch(lambda: self.has_stepped or self._captures)

    def begin(self) -> None:
        """Begin a training without a checkpoint: loaders that were iterated before begin again."""
        for begin in _methods(self._modules.values(), "begin_training"):
            begin()
        self._training.begin(self._modules.values())
        self._frozen.begin(self._modules)
        self._added.begin(self._modules)
        self._attributes.begin(watched(self._modules))

    @property
    def objects(self) -> list[Any]:
        """The tracked objects, as they were given and without wrappers."""
        return [*self._given, *self._modules.values()]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parts, in the order in which they are saved."""
        return (*self._parts, RNG, PROGRESS)

    def layouts(self, *, check: bool = True) -> dict[str, ModuleLayout]:
        """Return, by part, the layouts of the tracked torch modules that a load can fill without an error.

        Raises:
            StateError: `check` is set, and a tracked object holds a value that cannot be stored.
        """
        found = {}
        for name, save in {**{name: save for name, (save, _) in self._parts.items()}, PROGRESS: self._progress}.items():
            layout = None
            try:
                state, module = _noted(name, "capturing", save), self._modules.get(name)
                if hasattr(module, "named_parameters"):
                    self._sizes[name] = len(state)
                layout = quick_layout(name, module, state)
                if layout is None and (flat := parts.check(name, state)):
                    layout = module_layout(module, flat)
            except NotYetError:
                continue
            except StateError:
                if check:
                    raise
            if layout is not None:
                found[name] = layout
        return found

    def capture(self, step: int) -> dict[str, Any]:
        """Return the current state, to save it. Warn of gradients, which are not part of it."""
        self._captures = True
        try:
            state = self.state(step)
            # Not in `state`, which `verify=True` compares: an attribute may hold a time.
            waits = self._held is not None and not self._held.is_set
            if attributes := self._loaded_attributes if waits else self._attributes.changed():
                state[ATTRIBUTES] = attributes
        finally:
            self._captures = False
        self.has_stepped = True
        self._gradients.captured(step, self._modules)
        self._tell_change(next((name for name, size in self._sizes.items() if len(state[name]) != size), None))
        return state

    def look(self) -> None:
        """Look at the plain attributes after a step without a save; see `ChangedAttributes.look`."""
        if self._held is None or self._held.is_set:
            self._attributes.look()

    def _tell_change(self, part: str | None) -> None:
        """Warn, once, that a part has other entries than at the start; None: no part."""
        if part is None or not self.tells_changes:
            return
        self.tells_changes = False
        message = (
            f"part {part!r}: the training has changed its entries, so a start that makes the same change only later "
            'cannot load this checkpoint. Call checkpointer.restore(parts=["progress"]) first, make the changes that '
            'were made before checkpointer.progress["step"], then call restore()'
        )
        warnings.warn(message, CheckpointWarning, stacklevel=4)

    def state(self, step: int) -> dict[str, Any]:
        """Return the current state: part name to value. Its tensors are live: save or copy it before the next step."""
        if self._held is not None and step != self.progress.get("step"):
            self._held.is_set = True  # The training has gone on without the loader that waits for its iteration.
        self.progress["step"] = step
        state = {name: _noted(name, "capturing", save) for name, (save, _) in self._parts.items()}
        self._frozen.add(state)
        self._tell_change(self._added.add(state, self._modules))
        held = self._held
        shared = rng.capture_shared() if held is None or held.is_set else held.state
        return state | {RNG: shared, PROGRESS: self._progress()}

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        missing_ok: bool = False,
        extra_ok: bool = False,
        parts: Collection[str] | None = None,
    ) -> None:
        """Restore each object from its part of a loaded state, in the order of tracking.

        Modules with a `VerifiedPart` follow, which cannot fail any more; the random generators come last. If the load
        of an object raises an error, the objects that were restored before are put back.

        If a tracked loader or sampler was saved within its iteration, it restores the global random generators when the
        iteration resumes (`resume_generators`): random numbers that a script draws until then belong to its start.

        Args:
            state: part name to value.
            missing_ok: whether the state may lack tracked parts; their objects are not changed.
            extra_ok: whether the state may have parts that are not tracked; they are ignored.
            parts: names of the only parts to restore; None: all.

        Raises:
            StateError: a part is missing, or a part is not tracked. An exception of an object's own `load_state_dict`
                is raised unchanged, with a note that names the part.
            SystemExit: see `VerifiedPart.fill`.
        """
        wanted = self._wanted(state, missing_ok, extra_ok, parts)
        self._added.begin(self._modules)
        with ExitStack() as undo:
            undo.callback(rng.restore_shared, rng.capture_shared())
            refill = Refill(undo, self._modules)
            for name, (save, load) in self._parts.items():
                value = state[name] if name in wanted else None
                if name not in wanted or isinstance(value, VerifiedPart):
                    continue
                if load is _in_place:
                    _noted(name, "restoring", refill.fill, name, self._modules[name], value)
                else:
                    undo.callback(_put_back, name, load, _kept(name, save))
                    value = self._added.restore(name, value, self._modules, undo)
                    _noted(name, "restoring", load, value)
            if PROGRESS in wanted:
                refill.fill(PROGRESS, self.progress, state[PROGRESS])
            undo.pop_all()
        refill.warn()
        for name in wanted:
            if isinstance(state[name], VerifiedPart):
                state[name].fill()
        self._training.begin(self._modules.values())
        self._frozen.begin(self._modules)
        for name in wanted:
            self._frozen.restore(name, state[name])
        objects = watched(self._modules)
        if not (self.has_stepped and self._attributes.begin_again(objects)):
            self._attributes.begin(objects)
        self._loaded_attributes = state.get(ATTRIBUTES, {}) if parts is None else {}
        self._attributes.restore(self._loaded_attributes, data=False)
        if RNG in wanted:
            self._hold(state[RNG], wanted)

    def _hold(self, state: dict[str, Any], wanted: Collection[str]) -> None:
        """Restore the global random generators, or let the loaders among `wanted` restore them when they resume."""
        held = self._held = rng.HeldGenerators(state, lambda: self._attributes.restore(self._loaded_attributes))
        restored = [value for name, value in self._modules.items() if name in wanted]
        waiting = [wait(held) for wait in _methods(restored, "resume_generators")]
        if not any(waiting):
            held()

    def _wanted(
        self, state: Mapping[str, Any], missing_ok: bool, extra_ok: bool, parts: Collection[str] | None
    ) -> frozenset[str]:
        """Return the names of the parts to restore; see `restore`."""
        strange = [parts] if isinstance(parts, str) else [name for name in parts or () if name not in self.names]
        if strange:
            raise StateError(
                f"parts: {_listed(strange)} must be names of tracked parts; these are {_listed(self.names)}"
            )
        missing = [name for name in (self.names if parts is None else parts) if name not in state]
        unknown = [name for name in state if name not in (*self.names, ATTRIBUTES)]
        if missing and not missing_ok:
            raise StateError(
                f"the checkpoint lacks the tracked parts {_listed(missing)}; it has {_listed(state)}. To leave their "
                "objects as they are, pass missing_ok=True to restore"
            )
        if unknown and not extra_ok and parts is None:
            advice = "track them too, or pass extra_ok=True to restore, to ignore them"
            raise StateError(f"the checkpoint has parts that are not tracked, {_listed(unknown)}: {advice}")
        return frozenset(self.names if parts is None else parts) & state.keys()

    def _progress(self) -> dict[str, Any]:
        return dict(self.progress)

    def _accepted(self, name: str, value: Any) -> rng.Access:
        check_part_name(name)
        if name in (RNG, ATTRIBUTES):
            raise StateError(f"part {name!r} is saved by mizzen itself; use another name")
        if name in self._parts:
            raise StateError(f"part {name!r} is already tracked")
        if name == PROGRESS and not isinstance(value, MutableMapping):
            raise StateError(f"part {PROGRESS!r}: is a {type(value).__name__}; must be a dict")
        if any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(value).__mro__):
            raise StateError(
                f"part {name!r}: a StatefulDataLoader cannot be tracked: reading its state draws random numbers, and a "
                "resumed epoch draws others than the first one. Wrap it: loader = ResumableLoader(loader) of "
                "mizzen.integrations.torch, and iterate and track that"
            )
        access = _access(value)
        if access is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            wanted = "state_dict() and load_state_dict(), a dict, a pair (save, load), or a random generator"
            raise StateError(
                f"part {name!r}: {kind} cannot be tracked; use an object of your own classes, or one with {wanted}"
            )
        return access


def _access(value: Any) -> rng.Access | None:
    if found := rng.generator(value):
        return found
    inner = _unwrapped(value)
    save, load = getattr(inner, "state_dict", None), getattr(inner, "load_state_dict", None)
    if callable(save) and callable(load):
        torch = loaded("torch")
        is_module = torch is not None and isinstance(inner, torch.nn.Module)
        return (ModuleState(inner) if is_module else save), load
    match value:
        case (save, load) if callable(save) and callable(load):
            return save, load
    if isinstance(value, MutableMapping):
        return (lambda: dict(value)), _in_place
    return (dict, lambda _: None) if is_plain_object(value) else None  # `ChangedAttributes` has its attributes.


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


def _methods(objects: Iterable[Any], name: str) -> list[Callable[..., Any]]:
    """Return the methods of this name of the objects that have one; only loaders have."""
    return [found for one in objects if callable(found := getattr(one, name, None))]


def _in_place(_: Any) -> None:
    """Marks a dict, which `Refill` fills in place."""


def _kept(name: str, save: Callable[[], Any]) -> Callable[[], Any] | None:
    """Return a function that returns a copy of the object's current state; None if it cannot be copied."""
    try:
        kind, chunks = parts.encode(name, save())
    except Exception:  # The object may have no state yet.
        return None
    content = bytearray().join(chunks)
    return lambda: parts.decode(kind, content, True, name=name)


def _put_back(name: str, load: Callable[[Any], object], kept: Callable[[], Any] | None) -> None:
    """Load the state that an object had before a restore that has failed."""
    try:
        if kept is None:
            raise StateError("its state could not be copied before")
        load(kept())
    except Exception as error:
        warnings.warn(f"part {name!r} could not be put back: {error}", CheckpointWarning, stacklevel=4)


def _noted(name: str, doing: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        error.add_note(f"while {doing} the part {name!r}")
        raise


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "none"
