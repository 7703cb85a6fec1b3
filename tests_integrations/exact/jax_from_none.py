"""JAX: an average and statistics that begin with None, dropout keys, a plateau schedule of the script."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mizzen import Checkpointer
from mizzen.integrations.jax import Pytree

rows = np.random.default_rng(0)
X = rows.normal(size=(96, 4)).astype(np.float32)
Y = np.sin(X.sum(1)).astype(np.float32)
key = jax.random.PRNGKey(1)
params = {"w": jax.random.normal(key, (4, 8)) * 0.5, "v": jnp.zeros(8)}
tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.05)
state = Pytree({"params": params, "opt": tx.init(params), "key": key})
extra = {"ema": None, "best": None, "bad": None, "order": None}
rng = np.random.default_rng(5)


@jax.jit
def loss(params, x, y, key):
    h = jnp.tanh(x @ params["w"])
    h = h * jax.random.bernoulli(key, 0.8, h.shape) / 0.8
    return ((h @ params["v"] - y) ** 2).mean()


@jax.jit
def update(params, opt, x, y, key):
    value, grads = jax.value_and_grad(loss)(params, x, y, key)
    changes, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, changes), opt, value


ckpt = Checkpointer()
ckpt.track(state=state, extra=extra, dice=rng)
step = ckpt.restore()
while step < 30:
    if extra["order"] is None or len(extra["order"]) < 16:
        extra["order"] = rng.permutation(96)
    idx, extra["order"] = extra["order"][:16], extra["order"][16:]
    now = state.value
    key, sub = jax.random.split(now["key"])
    params, opt, value = update(now["params"], now["opt"], X[idx], Y[idx], sub)
    ema = extra["ema"]
    new = jax.tree.map(np.asarray, params)
    extra["ema"] = new if ema is None else jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, new)
    value = float(value)
    if extra["best"] is None or value < extra["best"]:
        extra["best"], extra["bad"] = value, None
    else:
        extra["bad"] = (extra["bad"] or 0) + 1
        if extra["bad"] >= 4:
            opt.hyperparams["learning_rate"] = opt.hyperparams["learning_rate"] * 0.5
            extra["bad"] = None
    state.value = {"params": params, "opt": opt, "key": key}
    step += 1
    ckpt.step(step)
found = [np.asarray(one).tolist() for one in jax.tree.leaves((state.value["params"], extra["ema"]))]
json.dump([found, extra["best"], float(state.value["opt"].hyperparams["learning_rate"])], open("result.json", "w"))
