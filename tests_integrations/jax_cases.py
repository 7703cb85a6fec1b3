"""Cases of `mizzen.integrations.jax`, which `test_jax.py` runs in a process of their own: JAX starts threads, and the
other tests fork.
"""

import gc
import itertools
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mizzen.checkpoint import Checkpointer, CheckpointWarning, ResumeError, StateError
from mizzen.integrations.jax import Pytree, verify_resume

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 20)))


class Averages(NamedTuple):
    fast: Any
    count: Any


@partial(jax.tree_util.register_dataclass, data_fields=["params", "optimizer", "averages", "key"], meta_fields=["name"])
class Training:
    def __init__(self, params: Any, optimizer: Any, averages: Any, key: Any, name: str) -> None:
        self.params, self.optimizer, self.averages, self.key, self.name = params, optimizer, averages, key, name


def made(seed: int = 0, parts: int = 4) -> Training:
    """Returns a training whose parameters are divided among the first devices."""
    devices = jax.make_mesh((parts,), ("rows",), devices=jax.devices()[:parts])
    rows = NamedSharding(devices, PartitionSpec("rows"))
    params = {
        "layer": jax.device_put(jax.random.normal(jax.random.key(seed), (8, 4)), rows),
        "short": jax.device_put(jnp.full((4,), 0.5, jnp.bfloat16), NamedSharding(devices, PartitionSpec())),
    }
    averages = Averages(jnp.asarray(1.0), 0)
    return Training(params, OPTIMIZER.init(params), averages, jax.random.key(seed, impl="rbg"), "first")


@jax.jit
def updated(training: Training) -> Training:
    key, noise, data = jax.random.split(training.key, 3)
    inputs = jax.random.normal(data, (16, 8))

    def loss(params: Any) -> Any:
        kept = jax.random.bernoulli(noise, 0.9, (16, 4))
        return jnp.mean((jnp.where(kept, jnp.tanh(inputs @ params["layer"]), 0) * params["short"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(training.params)
    changes, optimizer = OPTIMIZER.update(gradients, training.optimizer, training.params)
    averages = Averages(training.averages.fast * 0.9 + 0.1 * value, training.averages.count + 1)
    return Training(optax.apply_updates(training.params, changes), optimizer, averages, key, training.name)


def bits(tree: Any) -> list[tuple[str, str, bytes]]:
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        data = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        found.append((jax.tree_util.keystr(path), f"{leaf.aval}", numpy.asarray(data).tobytes()))
    return found


def trained(root: Path, steps: int, until: int, parts: int = 4) -> tuple[int, Pytree]:
    checkpointer = Checkpointer(root, interval_s=0)
    train = Pytree(made(parts=parts))
    checkpointer.track(train=train)
    first = step = checkpointer.restore()
    while step < min(first + steps, until):
        train.value = updated(train.value)
        step += 1
        checkpointer.step(step)
    return first, train


def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Types, also weak ones, named tuples, dataclasses, optax's states, keys and shardings survive."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        _, whole = trained(tmp_path / "whole", 9, 9)
        firsts = [trained(tmp_path / "cut", 3, 9)[0] for _ in range(2)]
        first, last = trained(tmp_path / "cut", 9, 9)
    assert [*firsts, first] == [0, 3, 6]
    assert bits(last.value) == bits(whole.value)
    assert type(last.value) is Training and type(last.value.averages) is Averages and last.value.name == "first"
    assert (
        last.value.averages.count.weak_type
        and last.value.averages.fast.weak_type == whole.value.averages.fast.weak_type
    )
    assert last.value.params["layer"].sharding == whole.value.params["layer"].sharding


def test_another_number_of_devices(tmp_path: Path) -> None:
    """What four devices have saved is divided between two."""
    _, saved = trained(tmp_path, 3, 3)
    train = Pytree(made(seed=7, parts=2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.track(train=train)
    assert checkpointer.restore() == 3
    assert bits(train.value) == bits(saved.value)
    assert len(train.value.params["layer"].sharding.device_set) == 2
    assert not train.value.averages.count.committed  # Else it could not be used beside the parameters.
    updated(train.value)


def test_all_types_are_stored(tmp_path: Path) -> None:
    """Arrays of JAX and of numpy in the short types, numbers and texts come back as they were."""
    types = [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.complex64, jnp.bool_, jnp.int8, jnp.uint32]
    tree = {
        "jax": [jnp.arange(3).astype(kind) for kind in types],
        "numpy": [numpy.arange(6).reshape(2, 3).T.astype(kind) for kind in (ml_dtypes.bfloat16, "float32")],
        "rest": (1, 2.5, "text", None, ml_dtypes.bfloat16(1.5), jnp.asarray(2), jnp.zeros((0, 3), jnp.bfloat16)),
        "same names": {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}},
        "old key": jax.random.PRNGKey(1),
    }
    trees = []
    for written in (tree, None):
        trees.append(
            Pytree(jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if isinstance(leaf, jax.Array) else 0, tree))
        )
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        checkpointer.track(tree=trees[-1])
        assert checkpointer.restore() == (0 if written else 1)
        if written:
            trees[-1].value = written
            checkpointer.step(1)
    train = trees[-1]
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(train.value), strict=True):
        assert type(one) is type(other)
        assert numpy.asarray(one).dtype == numpy.asarray(other).dtype and numpy.array_equal(one, other)
    assert jax.tree.structure(tree) == jax.tree.structure(train.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree | {"more": jnp.ones(2)}, "more: only the present tree has this leaf"),
        (lambda tree: {"a": tree["a"]}, "b: only the checkpoint has this leaf"),
        (
            lambda tree: tree | {"a": jnp.ones((3, 2))},
            "saved array is float32[2, 3], the present one float32[3",
        ),
        (
            lambda tree: tree | {"a": jnp.ones((2, 3), int)},
            "saved array is float32[2, 3], the present one int32",
        ),
    ],
)
def test_a_tree_that_does_not_fit_is_left_as_it_was(change: Any, message: str) -> None:
    """The error names the leaf; the value stays the same object."""
    tree = {"a": jnp.ones((2, 3)), "b": jnp.zeros(1)}
    state = Pytree(tree).state_dict()
    other = Pytree(change(tree))
    before = other.value
    with pytest.raises(StateError) as failed:
        other.load_state_dict(state)
    assert message in str(failed.value)
    assert other.value is before


def test_a_value_that_is_never_assigned_is_a_warning(tmp_path: Path) -> None:
    """A script that keeps the tree in a variable of its own is told at its first save."""
    gc.collect()  # Trees of the other cases were assigned.
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(train=Pytree(made()))
    checkpointer.restore()
    with pytest.warns(CheckpointWarning, match="assign it after each update"):
        checkpointer.step(1)


def test_resume_of_a_pure_function_is_verified() -> None:
    """A pure function passes; a function with a counter of its own is found, with the first leaf that differs."""
    verify_resume(updated, made, steps=2)
    calls = itertools.count()

    def hidden(training: Training) -> Training:
        training = updated(training)
        params = training.params | {"layer": training.params["layer"] + next(calls)}
        return Training(params, training.optimizer, training.averages, training.key, training.name)

    with pytest.raises(ResumeError, match=r"first at tree/leaves/params\.layer: 32 of 32 elements differ"):
        verify_resume(hidden, made)
