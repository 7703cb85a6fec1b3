"""Training with JAX: a pytree as a tracked object, and a check of pure training functions.

    train = Pytree({"params": params, "optimizer": optimizer.init(params), "key": jax.random.key(0)})
    checkpointer.track(train=train)
    step = checkpointer.restore()
    while step < steps:
        train.value = update(train.value, batch(step))
        step += 1
        checkpointer.step(step)

Arrays cannot change, so the script assigns the new tree to `value` after each update. A restore puts the saved leaves
into the structure of the present tree: named tuples, registered dataclasses and the states of optax are those of the
script. Each array is divided among the devices as it was, because the compiler may round differently otherwise. If no
array of the present tree is on a mesh with the same axes, as on another number of devices, it is divided like the array
that it replaces.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mizzen.checkpoint import CheckpointWarning, StateError, resume_check

_ARRAY, _WEAK, _KEY = "array", "weak", "key "
"""Kinds of arrays. A weak type, that of a Python number, adapts to other types. A key also has an algorithm."""
_living: "weakref.WeakSet[Pytree]" = weakref.WeakSet()


class Pytree:
    """A tree of arrays of JAX, and of whatever else a checkpoint can hold, for `Checkpointer.track`.

    Static fields of registered dataclasses are not leaves: they are not saved, and stay those of the script. All
    devices of the arrays must belong to this process.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        """The present tree. Assign the new one after each update."""
        self._has_stepped: Callable[[], bool] | None = None
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves by path, and the kind and the sharding of each leaf that is an array of JAX.

        Raises:
            StateError: devices of an array belong to another process.
        """
        self._warn_if_stale()
        leaves, arrays = {}, {}
        for path, leaf in _leaves(self.value).items():
            leaves[path] = leaf
            if isinstance(leaf, jax.Array):
                if not leaf.is_fully_addressable:
                    raise StateError(f"{path}: devices of this array belong to another process; gather the array first")
                kind = _kind(leaf)
                leaves[path] = jax.device_get(jax.random.key_data(leaf) if kind.startswith(_KEY) else leaf)
                arrays[path] = [kind, _written(leaf.sharding)]
        return {"leaves": leaves, "arrays": arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the saved leaves into the structure of the present tree.

        Raises:
            StateError: a leaf is missing or not in the tree, or has another shape or type. Nothing is changed.
        """
        saved, present = state["leaves"], _leaves(self.value)
        for path in [*present, *saved]:
            if path not in saved or path not in present:
                where = "the checkpoint" if path in saved else "the present tree"
                raise StateError(f"{path}: only {where} has this leaf; restore into a tree of the saved structure")
        shardings = [leaf.sharding for leaf in present.values() if isinstance(leaf, jax.Array)]
        meshes = {_axes(one.mesh): one.mesh for one in shardings if isinstance(one, NamedSharding)}
        new = []
        for path, old in present.items():
            kind, written = state["arrays"].get(path, (None, None))
            new.append(saved[path] if kind is None else _restored(path, saved[path], kind, old, _read(written, meshes)))
        self.value = jax.tree.unflatten(jax.tree.structure(self.value), new)
        self._begin()

    def watch_steps(self, has_stepped: Callable[[], bool]) -> None:
        """Use `has_stepped`, which returns whether a step was captured, to find values that are never assigned."""
        self._has_stepped = has_stepped

    def _begin(self) -> None:
        self._first = [weakref.ref(leaf) for leaf in jax.tree.leaves(self.value) if isinstance(leaf, jax.Array)]
        _living.add(self)

    @property
    def _is_first(self) -> bool:
        """Whether all arrays are still those of the start or of the restore."""
        now = [leaf for leaf in jax.tree.leaves(self.value) if isinstance(leaf, jax.Array)]
        return len(now) == len(self._first) and all(one() is leaf for one, leaf in zip(self._first, now, strict=True))

    def _warn_if_stale(self) -> None:
        if self._has_stepped is None or not self._has_stepped():
            return
        self._has_stepped = None
        if all(one._is_first for one in _living):
            message = "the value of this Pytree was not assigned since the start; assign it after each update"
            warnings.warn(message, CheckpointWarning, stacklevel=3)


def verify_resume(update: Callable[[Any], Any], make: Callable[[], Any], *, steps: int = 3, before: int = 1) -> None:
    """Check that a training that is resumed from a checkpoint equals an uninterrupted one, bit by bit.

    Like `mizzen.checkpoint.verify_resume`, for a function that returns the new tree instead of changing objects.

    Args:
        update: takes a tree, does one training step and returns the new tree.
        make: creates the tree at the start.
        steps: number of steps to compare, 1 or more.
        before: number of steps to train before the save.

    Raises:
        ResumeError: an entry differs: `update` depends on something that is not part of the tree.
        StateError: the tree cannot be stored.
        ValueError: `steps` or `before` is out of range.
    """

    def train_step(objects: dict[str, Pytree]) -> None:
        objects["tree"].value = update(objects["tree"].value)

    resume_check.verify_resume(train_step, lambda: {"tree": Pytree(make())}, steps=steps, before=before)


def _leaves(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    short = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}
    # Two paths may be equal if they are written shortly, such as those of the keys 1 and "1".
    return short if len(short) == len(found) else {jax.tree_util.keystr(path): leaf for path, leaf in found}


def _kind(array: jax.Array) -> str:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return f"{_KEY}{jax.random.key_impl(array)}"
    return _WEAK if array.weak_type else _ARRAY


def _axes(mesh: Any) -> tuple[tuple[str, int], ...]:
    return tuple(mesh.shape.items())


def _written(sharding: Any) -> Any:
    """Return a sharding over a mesh as it is saved; None for others."""
    return (
        [_axes(sharding.mesh), tuple(sharding.spec), sharding.memory_kind]
        if isinstance(sharding, NamedSharding)
        else None
    )


def _read(written: Any, meshes: dict[Any, Any]) -> NamedSharding | None:
    """Return a saved sharding, over the mesh of the present tree with the same axes; None if it has no such mesh."""
    if written is None or written[0] not in meshes:
        return None
    axes, spec, memory = written
    return NamedSharding(meshes[axes], PartitionSpec(*spec), memory_kind=memory)


def _restored(path: str, saved: Any, kind: str, old: Any, sharding: Any) -> Any:
    if kind.startswith(_KEY):
        array = jax.random.wrap_key_data(jnp.asarray(saved), impl=kind.removeprefix(_KEY))
    else:
        array = _weak(saved) if kind == _WEAK else saved
    if isinstance(old, jax.Array):  # Before the first update it may be a number.
        shapes = [f"{one.dtype}{list(one.shape)}" for one in (array, old)]
        if shapes[0] != shapes[1]:
            raise StateError(f"{path}: the saved array is {shapes[0]}, the present one {shapes[1]}")
        if sharding is None and old.committed:
            sharding = old.sharding
    return jax.device_put(array, sharding)


def _weak(saved: Any) -> Any:
    """Return a saved array with a weak type. Only numbers have one, and `set` keeps the type of what it changes."""
    zero = jnp.broadcast_to(jnp.asarray(saved.dtype.type(0).item()), saved.shape)
    return zero.at[...].set(saved) if zero.dtype == saved.dtype else saved
