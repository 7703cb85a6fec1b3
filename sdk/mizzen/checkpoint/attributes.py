"""Saves plain attributes of modules, optimizers and datasets that a training changes: no `state_dict` has them.

Examples are a counter (`self.step += 1`), a temperature that the script lowers, a hidden state that is kept between
batches, a history in a deque, metrics that accumulate, a random generator, a teacher that is hidden in a list, and the
difficulty of a dataset. Also buffers that are not persistent, and which modules are in training mode.

Only what has changed since the restore is saved, so a script may be started with other options. Attributes that each
step overwrites before it reads them are saved, too: this module cannot tell them from others. A cache of activations
can be large, so at most `MOST_BYTES` of the tensors that a training replaces are saved, the smallest first.
"""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from enum import Enum
from functools import cache
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from mizzen.checkpoint import rng, trees
from mizzen.checkpoint.devices import devices, has_graph, moved
from mizzen.checkpoint.errors import CheckpointWarning, StateError
from mizzen.checkpoint.known_modules import KnownModules, Named, is_module, modes_of, named_modules, saved_tensors
from mizzen.checkpoint.marks import ATOMS, MOST_BYTES, Large, is_atom, marked
from mizzen.checkpoint.own_names import hides, is_of_script
from mizzen.checkpoint.refill import Refill, storage
from mizzen.checkpoint.tensors import loaded

ATTRIBUTES = "attributes"
"""Name of the part. A checkpoint has it only if something has changed."""
_ITEMS = 100
"""Lists and dicts with more items are not searched for objects."""
_DEPTH = 4
_NO_HOLDERS = (type, FunctionType, ModuleType, Enum)
_TENSORS = ("_parameters", "_buffers")
_DATA = (".dataset", ".collate_fn")
"""How the names of parts end that are not tracked objects, but attributes of tracked loaders."""


class _Before(NamedTuple):
    """The attributes of one object at the restore."""

    values: dict[str, Any]
    marks: dict[str, Any]
    """See `marks.marked`, of the attributes whose values can change in place."""
    is_mutable: bool
    """Whether anything in it may change while it has the same values."""

    def is_same(self, now: Mapping[str, Any]) -> bool:
        """Return whether `now` are the same attributes."""
        if self.is_mutable or len(now) != len(self.values):
            return False
        return all(map(is_, now.values(), self.values.values()))


class _Holder(NamedTuple):
    """An object with attributes."""

    part: str
    path: str
    value: Any
    tensors: dict[str, dict[str, Any]]
    """Parameters and buffers that no `state_dict` of a tracked object has, by the attribute that has them."""
    inner: dict[str, list[tuple[str, Any]]]
    """The objects inside, with their paths, by attribute."""


class ChangedAttributes:
    """The attributes of some objects, and of the objects in their attributes."""

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._before: dict[str, _Before] = {}
        self._modes: dict[str, Any] = {}
        self._known: dict[str, KnownModules] = {}
        self._told = False

    def begin(self, objects: Mapping[str, Any]) -> None:
        """Remember the attributes of `objects`, by the names of their parts, as the script has made them."""
        self._objects = dict(objects)
        self._before, self._known = {}, {}
        named = self._named()
        for one in self._holders(named, {part: self._begin_plain(modules) for part, modules in named.items()}):
            marks = {name: mark for name, value in self._attributes(one) if (mark := marked(value)) is not None}
            self._before[one.path] = _Before(dict(vars(one.value)), marks, bool(marks or one.tensors or one.inner))
        self._modes = {part: modes_of(modules) for part, modules in named.items()}
        for part, modules in named.items():
            if modules:
                self._known[part] = known = KnownModules(modules, _excluded(type(self._objects[part])))
                known.mutable = [pair for pair in modules if self._before[pair[0]].is_mutable]

    def begin_again(self, objects: Mapping[str, Any]) -> bool:
        """Set numbers and texts as at `begin`, before a second restore; return False if it had other objects.

        What has changed is compared with the first start, because a later process begins there.
        """
        if [*objects] != [*self._objects] or not all(map(is_, objects.values(), self._objects.values())):
            return False
        named = self._named()
        for one in list(self._holders(named, named)):
            values = self._before.get(one.path, _Before({}, {}, True)).values
            names = [name for name, _ in self._attributes(one) if name in values]
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
                sizes.get(kind) == len(now) or all(is_atom(now[name]) for name in now.keys() - _excluded(kind))
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
        values: dict[str, dict[str, Any]] = {}
        generators: dict[str, dict[str, Any]] = {}
        members: dict[str, dict[str, Any]] = {}
        replaced: dict[str, list[str]] = {}
        large: list[str] = []
        named = self._named()
        others = {part: self._suspects(part, modules) for part, modules in named.items()}
        for one in self._holders(named, others):
            before = self._before.get(one.path, _Before({}, {}, True))
            others_now = [name for name in one.inner if _is_other(vars(one.value)[name], before.values.get(name))]
            replaced |= {one.path: others_now} if others_now else {}
            for name, value in self._attributes(one):
                if is_atom(value):
                    old = before.values.get(name, before)
                    if type(old) is not type(value) or old != value:
                        values.setdefault(one.path, {})[name] = value
                elif isinstance(value, Enum):
                    if value is not before.values.get(name) and is_atom(value.value):
                        members.setdefault(one.path, {})[name] = value.value
                elif (mark := marked(value)) is not None and mark != before.marks.get(name):
                    if isinstance(mark, Large):
                        large += [] if one.part.endswith(_DATA) else [f"{one.path}.{name}"]
                        continue
                    access = rng.generator(value)
                    if access is not None and one.part.endswith(_DATA):
                        continue  # Its loader saves it.
                    (values if access is None else generators).setdefault(one.path, {})[name] = (
                        value if access is None else access[0]()
                    )
        modes = {
            part: mode
            for part, known in self._known.items()
            if not (known.pairs is named[part] and known.have_mode())
            and (mode := modes_of(named[part])) != self._modes[part]
        }
        kept = self._storable(values, large)
        self._tell(large)
        found = {"values": kept, "generators": generators, "members": members, "modes": modes}
        if not any(found.values()):
            return {}
        return found | {"apart": self._apart(kept), "replaced": replaced}

    def restore(self, saved: Mapping[str, Any], *, data: bool = True) -> None:
        """Set the attributes as they were when `changed` returned `saved`. What the objects have no more is ignored.

        `data`: also those of datasets and collators, which a script may use for looks at the data before it resumes.
        """
        if not saved:
            return
        refill = Refill(ExitStack(), self._objects)
        named, places = self._named(), {part: self._device(part) for part in self._objects}
        for one in list(self._holders(named, named)):
            # A copy, because the script may hold the object of the start elsewhere, as in a list of stages.
            for name in saved["replaced"].get(one.path, ()):
                if _is_holder(old := vars(one.value).get(name)) and not is_module(old):
                    vars(one.value)[name] = copy.copy(old)
        for one in list(self._holders(named, named)):
            if one.part.endswith(_DATA) and not data:
                continue
            content = vars(one.value)
            for name, new in saved["values"].get(one.path, {}).items():
                if name in _TENSORS and is_module(one.value):
                    _fill(content[name], new, refill)
                elif not (is_module(one.value) and any(name in content[key] for key in (*_TENSORS, "_modules"))):
                    old = content.get(name)
                    device = None if name in saved["apart"].get(one.path, ()) else places[one.part]
                    # A copy, because `saved` may be restored once more after the script has changed the value in place.
                    content[name] = refill.filled(old, moved(copy.deepcopy(new), old, device), name)
            for name, new in saved["members"].get(one.path, {}).items():
                if isinstance(old := content.get(name), Enum):
                    with suppress(ValueError):  # The script may have another enumeration now.
                        content[name] = type(old)(new)
            for name, state in saved["generators"].get(one.path, {}).items():
                if (access := rng.generator(content.get(name))) is not None:
                    _set_state(f"{one.path}.{name}", access[1], state)
        for part, (training, names) in saved["modes"].items():
            others = set(names)
            for name, module in named.get(part, ()):
                module.training = training != (name in others)

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

    def _tell(self, large: list[str]) -> None:
        """Warn, once, of attributes that are too large to be saved."""
        if large and not self._told:
            self._told = True
            message = (
                f"{', '.join(large)}: the training changes this, but it is too large for an attribute (more than "
                "64 MiB, or 20,000 items), so it is not in the checkpoint. Make it a buffer of the module, or track "
                "it; if each step computes it again, delete it before step()"
            )
            warnings.warn(message, CheckpointWarning, stacklevel=5)

    def _storable(self, values: dict[str, dict[str, Any]], large: list[str]) -> dict[str, dict[str, Any]]:
        """Return the values that can be stored and do not share memory with the tracked objects.

        Adds the paths of those that are too large to `large`, unless they belong to data, which may be a cache, or to
        the graph of a backward pass.
        """
        owned: set[int] | None = None
        sizes: list[tuple[int, str, str]] = []
        for path, found in values.items():
            for name, value in list(found.items()):
                with suppress(StateError, RuntimeError):
                    flat = trees.flatten(ATTRIBUTES, value) if type(value) not in ATOMS else None
                    tensors = [one for _, one in flat.leaves if hasattr(one, "untyped_storage")] if flat else []
                    if tensors and owned is None:
                        owned = self._owned()
                    if not any(storage(one) in owned for one in tensors if owned):
                        is_bound = name in _TENSORS
                        sizes.append(
                            (0 if is_bound or not flat else sum(one.nbytes for _, one in flat.leaves), path, name)
                        )
                        continue
                del found[name]
        left = MOST_BYTES
        for size_bytes, path, name in sorted(sizes):
            left -= size_bytes
            if left < 0 and size_bytes:
                is_data = any(path.startswith(part) for part in self._objects if part.endswith(_DATA))
                if not (has_graph(values[path].pop(name)) or is_data):
                    large.append(f"{path}.{name}")
        return {path: found for path, found in values.items() if found}

    def _owned(self) -> set[int]:
        """Return the memory of the tensors that the `state_dict` of a tracked module has."""
        modules = [one for one in self._objects.values() if is_module(one)]
        every = (tensor for one in modules for tensor in saved_tensors(one))
        return {storage(tensor) for tensor in every} - {0}

    def _attributes(self, one: _Holder) -> Iterator[tuple[str, Any]]:
        """Yield the attributes of an object that may be saved, without those in which other objects are searched."""
        excluded = _excluded(type(one.value))
        hidden = hides(type(one.value))
        for name, value in list(vars(one.value).items()):
            if name not in excluded and name not in one.inner and not (hidden and hidden(name)):
                yield name, value
        yield from one.tensors.items()

    def _named(self) -> dict[str, Named]:
        """Return the modules of each part, with their paths; none for other objects."""
        known = {part: one.pairs for part, one in self._known.items() if one.are_same()}
        return {part: known.get(part) or named_modules(one, part) for part, one in self._objects.items()}

    def _holders(self, named: Mapping[str, Named], among: Mapping[str, Named]) -> Iterator[_Holder]:
        """Yield the tracked objects and those inside; of the modules in `named`, only those in `among`."""
        seen = {id(inner) for modules in named.values() for _, inner in modules}
        seen |= {id(one) for one in self._objects.values()}
        for part, one in self._objects.items():
            if named[part]:
                for path, module in among[part]:
                    hidden = {key: module._buffers[key] for key in sorted(module._non_persistent_buffers_set)}
                    hidden = {key: tensor for key, tensor in hidden.items() if tensor is not None}
                    held = {"_buffers": hidden} if module._non_persistent_buffers_set else {}
                    yield from self._below(part, path, module, held, seen, _DEPTH)
            else:
                yield from self._below(part, part, one, {}, seen, _DEPTH)

    def _below(
        self, part: str, path: str, value: Any, tensors: dict[str, dict[str, Any]], seen: set[int], depth: int
    ) -> Iterator[_Holder]:
        inner: dict[str, list[tuple[str, Any]]] = {}
        excluded, hidden = _excluded(type(value)), hides(type(value))
        for name, one in list(vars(value).items()) if depth else ():
            if type(one) in ATOMS or name in excluded or (hidden and hidden(name)):
                continue
            if found := [(f"{path}.{name}{key}", each) for key, each in _objects_in(one)]:
                inner[name] = found
        yield _Holder(part, path, value, tensors, inner)
        for below, one in (pair for pairs in inner.values() for pair in pairs):
            for inside, each in named_modules(one, below) or [(below, one)]:
                if id(each) not in seen:
                    seen.add(id(each))
                    held = {key: dict(vars(each)[key]) for key in _TENSORS} if is_module(each) else {}
                    yield from self._below(part, inside, each, held, seen, depth - 1)


def watched(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some objects whose attributes are saved: modules, optimizers, and what loaders take data from."""
    torch, found = loaded("torch"), {}
    for name, one in objects.items() if torch is not None else ():
        if is_module(one) or isinstance(one, torch.optim.Optimizer):
            found[name] = one
            continue
        for suffix in _DATA:
            data = getattr(one, suffix[1:], None)
            kind = type(data)
            is_known = is_of_script(kind) or kind.__module__ == "torch.utils.data.dataset"
            if is_known and not hasattr(data, "state_dict") and isinstance(getattr(data, "__dict__", None), dict):
                found[name + suffix] = data
    return found


def _objects_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules and the objects of the script in an attribute, each with a suffix for its path."""
    if _is_holder(value):
        yield "", value
    elif isinstance(value, list | tuple | dict) and len(value) <= _ITEMS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"[{key!r}]", one) for key, one in items if type(one) not in ATOMS and _is_holder(one))


def _is_other(value: Any, before: Any) -> bool:
    """Return whether an object of the script has replaced another one of its class."""
    return value is not before and type(value) is type(before) and _is_holder(value) and not is_module(value)


def _is_holder(value: Any) -> bool:
    if is_module(value):
        return True
    kind = type(value)
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, _NO_HOLDERS):
        return False
    return is_of_script(kind) and rng.generator(value) is None and not isinstance(value, list | dict | tuple | deque)


def _excluded_of(kind: type) -> frozenset[str]:
    """Return the attributes that a library uses itself."""
    torch = loaded("torch")
    if torch is not None and issubclass(kind, torch.nn.Module):
        return frozenset(vars(torch.nn.Module()))
    if torch is not None and issubclass(kind, torch.optim.Optimizer):
        return frozenset({"defaults", "state", "param_groups"})
    return frozenset()


# With the types of plain functions: mypy takes a class of any kind for unhashable.
_excluded: Callable[[type], frozenset[str]] = cache(_excluded_of)


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
