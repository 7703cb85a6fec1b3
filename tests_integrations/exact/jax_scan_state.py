"""Epochs in one compiled scan, a registered dataclass as the state, and the best parameters."""

import dataclasses
import functools
import json
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mizzen import Checkpointer
from mizzen.integrations.jax import Pytree


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state", "rng"], meta_fields=[])
@dataclasses.dataclass
class TrainState:
    step: Any
    params: Any
    opt_state: Any
    rng: Any


opt = optax.sgd(optax.exponential_decay(0.1, 5, 0.8), momentum=0.9, nesterov=True)


@jax.jit
def epoch(state, xs, ys):
    rng, perm_key = jax.random.split(state.rng)
    order = jax.random.permutation(perm_key, len(xs)).reshape(-1, 8)

    def body(carry, idx):
        params, opt_state = carry
        loss, g = jax.value_and_grad(lambda p: jnp.mean((xs[idx] @ p["w"] + p["b"] - ys[idx]) ** 2))(params)
        up, opt_state = opt.update(g, opt_state, params)
        return (optax.apply_updates(params, up), opt_state), loss

    (params, opt_state), losses = jax.lax.scan(body, (state.params, state.opt_state), order)
    return TrainState(state.step + 1, params, opt_state, rng), losses.mean()


xs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
ys = xs @ np.float32([1, 2, 3])
params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
holder = Pytree(TrainState(jnp.zeros((), jnp.int32), params, opt.init(params), jax.random.key(0)))
ck = Checkpointer()
best = {"loss": float("inf"), "params": None}
ck.track(train=holder, best=best)
ck.restore()
while int(holder.value.step) < 12:
    holder.value, loss = epoch(holder.value, xs, ys)
    if float(loss) < best["loss"]:
        best["loss"], best["params"] = float(loss), jax.tree.map(np.asarray, holder.value.params)
    ck.step(int(holder.value.step))
with open("result.json", "w") as f:
    json.dump([best["loss"], jax.tree.map(lambda a: np.asarray(a).tolist(), holder.value.params)], f)
