"""Saves plain attributes of modules, optimizers and datasets that a training changes: no `state_dict` has them.

Examples are a counter (`self.step += 1`), a temperature that the script lowers, a hidden state that is kept between
batches, a history in a deque, metrics that accumulate, a random generator, a teacher that is hidden in a list, and the
difficulty of a dataset. Also buffers that are not persistent, and which modules are in training mode.

Only what has changed since the restore is saved, so a script may be started with other options. Attributes that each
step overwrites before it reads them are saved, too: this module cannot tell them from others. A cache of activations
can be large, so at most `MOST_BYTES` of the tensors that a training replaces are saved, the smallest first.

An attribute of a tree that can be stored is filled in place. Another value, such as an object that the training has
created, is saved as a description (`Description`), from which a restore makes it.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from enum import Enum
from operator import is_
from typing import Any, NamedTuple

from mizzen.checkpoint import rng
from mizzen.checkpoint.attribute_holders import (
    DATA,
    INNER,
    TENSORS,
    AttributeHolder,
    excluded_of,
    holders,
    inside,
    is_dataset,
    place_of,
)
from mizzen.checkpoint.descriptions import Description, Known, Making, PartialError, TooLargeError, is_made, is_plain
from mizzen.checkpoint.errors import CheckpointWarning
from mizzen.checkpoint.known_modules import KnownModules, Named, is_module, modes_of, named_modules, saved_tensors
from mizzen.checkpoint.marks import Large, Unchanging, is_atom, marked
from mizzen.checkpoint.own_names import look_again
from mizzen.checkpoint.refill import Refill, has_other_order
from mizzen.checkpoint.storable import Found, devices, moved, storable
from mizzen.checkpoint.tensors import loaded

ATTRIBUTES = "attributes"
"""Name of the part. A checkpoint has it only if something has changed."""
_FIXED = frozenset({"name", "enum", "torch", "path", "range", "known"})
"""Kinds of descriptions of values that cannot change in place."""


class _Before(NamedTuple):
    """The attributes of one object at the restore."""

    values: dict[str, Any]
    marks: dict[str, Any]
    """See `marks.marked`, of the attributes whose values are not numbers or texts."""
    is_mutable: bool
    """Whether anything in it may change while it has the same values."""

    def is_same(self, now: Mapping[str, Any]) -> bool:
        """Return whether `now` are the same attributes."""
        if self.is_mutable or len(now) != len(self.values):
            return False
        return all(map(is_, now.values(), self.values.values()))


_NOTHING = _Before({}, {}, True)


class ChangedAttributes:
    """The attributes of some objects, and of the objects in their attributes."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._before: dict[str, _Before] = {}
        self._inside: list[AttributeHolder] = []
        """The objects at the restore that are no modules of tracked ones."""
        self._start = Known()
        self._saved: set[int] | None = None
        """The `id` of each tensor that the `state_dict` of a tracked module has; None: not yet needed."""
        self._modes: dict[str, Any] = {}
        self._known: dict[str, KnownModules] = {}
        self._told = set[str]()
        self._lost: dict[str, list[Any]] = {}
        """Objects that the last checkpoint lacks because they cannot be made again, by path."""
        self._has_looked = False
        """Whether `changed` was called since `begin`."""

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Remember the attributes of `objects`, by the names of their parts, as the script has made them."""
        look_again()
        self._objects = dict(objects)
        self._before, self._known, self._start, self._lost, self._has_looked = {}, {}, Known(), {}, False
        self._saved = None
        named = self._named()
        every = list(holders(objects, named, {part: self._begin_plain(modules) for part, modules in named.items()}))
        self._inside = [one for one in every if one.is_inside or not named[one.part]]
        for modules in named.values():
            self._start.add(modules)
        self._start.add([(one.path, one.value) for one in every])
        attributes = [(one, [*one.attributes(), *one.tensors().items()]) for one in every]
        for _, pairs in attributes:
            self._start.add_kinds(type(value) for _, value in pairs if isinstance(value, Enum))
        for one, pairs in attributes:
            marks = {name: mark for name, value in pairs if (mark := self._mark(value)) is not None}
            is_mutable = not all(isinstance(mark, Unchanging) for mark in marks.values())
            self._before[one.path] = _Before(dict(vars(one.value)), marks, is_mutable)
        self._modes = {part: modes_of(modules) for part, modules in named.items()}
        for part, modules in named.items():
            if modules:
                self._known[part] = known = KnownModules(modules, excluded_of(type(self._objects[part])))
                known.mutable = [pair for pair in modules if self._before[pair[0]].is_mutable]

    def begin_again(self, objects: Mapping[str, Any]) -> bool:
        """Set numbers and texts as at `begin`, before a second restore; return False if it had other objects.

        What has changed is compared with the first start, because a later process begins there.
        """
        if [*objects] != [*self._objects] or not all(map(is_, objects.values(), self._objects.values())):
            return False
        for one in self._every(self._named()):
            values = self._before.get(one.path, _NOTHING).values
            names = [name for name, _ in one.attributes() if name in values]
            vars(one.value).update({name: values[name] for name in names if is_atom(values[name])})
        return True

    def _begin_plain(self, modules: Named) -> Named:
        """Remember the attributes of the modules that have only numbers and texts, and return the others.

        This is quicker than the general way, and most modules are of a few classes of torch.
        """
        sizes: dict[type, int] = {}
        others = []
        for pair in modules:
            path, module = pair
            kind, now = type(module), vars(module)
            is_plain = not module._non_persistent_buffers_set and (
                sizes.get(kind) == len(now) or all(is_atom(now[name]) for name in now.keys() - excluded_of(kind))
            )
            if not is_plain:
                others.append(pair)
                continue
            self._before[path] = _Before(now.copy(), {}, False)
            if kind.__module__.startswith("torch.nn."):
                sizes[kind] = len(now)
        return others

    def changed(self) -> dict[str, Any]:
        """Return what has changed since `begin`, as a tree that can be stored; {} if nothing has changed."""
        self._has_looked = True
        found, named = Found(), self._named()
        for one in self._every({part: self._suspects(part, modules) for part, modules in named.items()}):
            before = self._before.get(one.path, _NOTHING)
            for name, value in [*one.attributes(), *one.tensors().items()]:
                if not is_atom(value):
                    self._find(found, one, name, value, before)
                elif type(old := before.values.get(name, before)) is not type(value) or old != value:
                    found.values.setdefault(one.path, {})[name] = value
        for path, name, value, description in self._put_in(named):
            found.add(path, name, value, description)
        modes = {
            part: mode
            for part, known in self._known.items()
            if not (known.pairs is named[part] and known.have_mode())
            and (mode := modes_of(named[part])) != self._modes[part]
        }
        kept, large = storable(found.values, self._objects)
        self._tell_large(found.large + large)
        made = {path: [name for name in ones if name in kept.get(path, ())] for path, ones in found.made.items()}
        for path, ones in found.made.items():
            names = [name for name in ones if name not in made[path] and f"{path}.{name}" not in large]
            found.lost |= {f"{path}.{name}": ones[name] for name in names}
        self._tell_lost(found.lost)
        if not (kept or found.generators or modes):
            return {}
        return {
            "values": kept,
            "generators": found.generators,
            "modes": modes,
            "apart": self._apart(kept),
            "made": made,
        }

    def _find(self, found: Found, one: AttributeHolder, name: str, value: Any, before: _Before) -> None:
        """Add an attribute to `found` if it has changed. Its value is no number or text."""
        where, is_data = f"{one.path}.{name}", one.part.endswith(DATA)
        is_cache = is_data or is_dataset(one.value) or is_dataset(value)
        old, mark = before.values.get(name, before), self._mark(value)
        if mark is None:
            if not is_cache and (value is not old or name in before.marks) and any(map(is_made, inside(value))):
                found.lost[where] = value
        elif mark == before.marks.get(name):
            return
        elif isinstance(mark, Large):
            found.large += [] if is_cache else [where]
        elif (access := rng.generator(value)) is not None and type(old) is type(value):
            if not is_data:  # Its loader saves it.
                found.generators.setdefault(one.path, {})[name] = access[0]()
        elif name in TENSORS or (value is old and hasattr(value, "untyped_storage")) or is_plain(value):
            found.values.setdefault(one.path, {})[name] = value
        else:
            description = self._described(value)
            found.add(one.path, name, value, description)
            if description is not None and description.omitted and not is_cache:
                found.lost[where] = value

    def look(self) -> None:
        """Look at the attributes after a step without a save: the first checkpoint can then tell which objects stay."""
        if not self._has_looked:
            self.changed()

    def restore(self, saved: Mapping[str, Any], *, data: bool = True) -> None:
        """Set the attributes as they were when `changed` returned `saved`. What the objects have no more is ignored.

        `data`: also those of datasets and collators, which a script may use for looks at the data before it resumes.
        """
        if not saved:
            return
        refill = Refill(ExitStack(), self._objects)
        places = {part: self._device(part) for part in self._objects}
        every = [one for one in self._every(self._named()) if data or not one.part.endswith(DATA)]
        for one in every:
            made, apart = (saved[kind].get(one.path, ()) for kind in ("made", "apart"))
            for name, value in saved["values"].get(one.path, {}).items():
                if name in TENSORS and is_module(one.value):
                    _fill(vars(one.value)[name], value, refill)
                    continue
                content, key = place_of(one.value, name)
                if content is None:
                    continue
                old, device = content.get(key), None if name in apart else places[one.part]
                # A copy, because `saved` may be restored once more after the script has changed the value in place.
                new = moved(copy.deepcopy(value), None if name in made else old, device)
                if name in made:
                    new = self._made(new, old, f"{one.path}.{name}")
                is_like = name not in made or (type(new) is type(old) and _has_gradient(new) == _has_gradient(old))
                content[key] = refill.filled(old, new, name) if is_like and not has_other_order(old, new) else new
        for one in every:
            for name, state in saved["generators"].get(one.path, {}).items():
                if (access := rng.generator(vars(one.value).get(name))) is not None:
                    _set_state(f"{one.path}.{name}", access[1], state)
        named = self._named()
        for part, (training, names) in saved["modes"].items():
            others = set(names)
            for name, module in named.get(part, ()):
                module.training = training != (name in others)

    def _every(self, among: Mapping[str, Named]) -> Iterator[AttributeHolder]:
        """Yield the tracked objects, of their modules only those in `among`, and the objects inside at `begin`."""
        for part, modules in among.items():
            yield from (AttributeHolder(part, path, module) for path, module in modules)
        yield from self._inside

    def _mark(self, value: Any) -> Any:
        """Return a mark that differs after each change of a value; None if it cannot be saved."""
        if is_atom(value) or (mark := marked(value, self._is_saved)) is not None:
            return None if is_atom(value) else mark
        try:
            tree = Description(self._start, value).tree
        except TooLargeError:
            return Large((type(value), id(value)))
        except (TypeError, RecursionError):
            return None
        return Unchanging(tree) if tree[0] in _FIXED else marked(tree, self._is_saved)

    def _is_saved(self, tensor: Any) -> bool:
        """Return whether the `state_dict` of a tracked module has a tensor, as those in `_flat_weights` of an LSTM."""
        if self._saved is None:
            modules = filter(is_module, self._objects.values())
            self._saved = {id(one) for module in modules for one in saved_tensors(module)}
        return id(tensor) in self._saved

    def _described(self, value: Any) -> Description | None:
        """Return the description of a value; None if it cannot be described."""
        with suppress(TypeError, RecursionError, TooLargeError):
            return Description(self._start, value)
        return None

    def _made(self, tree: Any, old: Any, where: str) -> Any:
        """Return the described value; `old`, with a warning, if the script cannot make it any more."""
        try:
            return Making(self._start).value(tree, old)
        except PartialError:
            return old  # It was told at the save, unless each step creates it again.
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            warnings.warn(f"{where}: cannot be restored: {error}", CheckpointWarning, stacklevel=5)
            return old

    def _put_in(self, named: Mapping[str, Named]) -> Iterator[tuple[str, str, Any, Description]]:
        """Yield the modules without parameters that the training has put into tracked ones, such as an activation.

        Modules with parameters change the entries of the `state_dict`, which has a warning of its own.
        """
        for part, modules in named.items():
            known = self._known.get(part)
            for path, module in modules if known is not None and known.pairs is not modules else ():
                for key, inner in module._modules.items() if path in self._before else ():
                    is_known = type(self._start.objects.get(f"{path}.{key}")) is type(inner)
                    if inner is None or is_known or any(True for _ in saved_tensors(inner)):
                        continue
                    if (description := self._described(inner)) is not None:
                        yield path, INNER + key, inner, description

    def _apart(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """Return the attributes with tensors that are on another device than the tracked module, by path."""
        parts = sorted(self._objects, key=len, reverse=True)
        found = {}
        for path, attributes in values.items():
            device = self._device(next(part for part in parts if path.startswith(part)))
            names = [name for name, value in attributes.items() if device and devices(value) - {device}]
            if names:
                found[path] = names
        return found

    def _device(self, part: str) -> Any:
        """Return the device of a tracked module; for another object, that of the first tracked module."""
        modules = [one for one in (self._objects[part], *self._objects.values()) if is_module(one)]
        return next((tensor.device for tensor in modules[0].parameters()), None) if modules else None

    def _suspects(self, part: str, modules: Named) -> Named:
        """Return those of a part's modules that are new, or in which something may have changed."""
        known, before = self._known.get(part), self._before
        suspects = modules if known is None else known.suspects(modules)
        return [pair for pair in suspects if pair[0] not in before or not before[pair[0]].is_same(vars(pair[1]))]

    def _tell_large(self, large: list[str]) -> None:
        """Warn, once, of attributes that are too large to be saved."""
        if large and "large" not in self._told:
            self._told.add("large")
            message = (
                f"{', '.join(large)}: the training changes this, but it is too large for an attribute (more than "
                "64 MiB, 20,000 items, or 5,000 objects), so it is not in the checkpoint. Make it a buffer of the "
                "module, or track it; if each step computes it again, delete it before step()"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=5)

    def _tell_lost(self, lost: dict[str, Any]) -> None:
        """Warn, once, of objects that no restart can make again, if they are the same as at the call before.

        An object that each step creates again need not be saved.
        """
        now = {where: inside(one) or [one] for where, one in lost.items()}
        found = [
            where for where, ones in now.items() if any(one is old for one in ones for old in self._lost.get(where, ()))
        ]
        self._lost = now
        if found and "lost" not in self._told:
            self._told.add("lost")
            reason = self._why(lost[found[0]])
            message = (
                f"{', '.join(found)}: created by the training, and a restart cannot create it ({reason}), so it is not "
                "in the checkpoint. Create it before restore(): the attributes that change are then saved; or track it"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=5)

    def _why(self, value: Any) -> str:
        try:
            omitted = Description(self._start, value).omitted
        except (TypeError, RecursionError) as error:
            return str(error)
        return f"attribute {', '.join(omitted)}" if omitted else "it holds parameters of a tracked module"

    def _named(self) -> dict[str, Named]:
        """Return the modules of each part, with their paths; none for other objects."""
        known = {part: one.pairs for part, one in self._known.items() if one.are_same()}
        return {part: known.get(part) or named_modules(one, part) for part, one in self._objects.items()}


def _has_gradient(value: Any) -> bool:
    return bool(getattr(value, "requires_grad", False))


def _fill(target: dict[str, Any], content: Mapping[str, Any], refill: Refill) -> None:
    """Fill parameters or buffers in place. A buffer of another shape is replaced."""
    for name, new in content.items():
        if name not in target:
            continue
        old = target[name]
        filled = refill.filled(old, moved(new, old, None), name)
        if filled is not old and not isinstance(old, loaded("torch").nn.Parameter):
            target[name] = filled


def _set_state(path: str, load: Callable[[Any], object], state: Any) -> None:
    """Set the state of a generator. A script that was started with other options may have one of another kind."""
    try:
        load(state)
    except Exception as error:
        message = f"{path}: the saved state of the random generator does not fit, and was left out: {error}"
        warnings.warn(message, CheckpointWarning, stacklevel=5)
