"""optax.MultiSteps over microbatches with a last partial one, a scan in the update, a schedule by an outer counter."""

import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mizzen import Checkpointer
from mizzen.integrations.jax import Pytree

rng = np.random.default_rng(0)
xs, ys = rng.normal(size=(50, 6)).astype("f"), rng.normal(size=(50,)).astype("f")
tx = optax.MultiSteps(
    optax.chain(optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(1e-2, 40))), every_k_schedule=3
)


def net(params, x, key):
    def layer(h, wk):
        w, k = wk
        h = jnp.tanh(h @ w)
        return h * jax.random.bernoulli(k, 0.9, h.shape) / 0.9, None

    h, _ = jax.lax.scan(layer, x, (params["layers"], jax.random.split(key, 2)))
    return h @ params["out"]


@jax.jit
def update(params, opt_state, key, x, y):
    key, sub = jax.random.split(key)
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((net(p, x, sub) - y) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, key, loss


key = jax.random.key(0)
params = {"layers": jax.random.normal(key, (2, 6, 6)) * 0.4, "out": jnp.ones(6) * 0.1}
state = Pytree({"params": params, "opt": tx.init(params), "key": jax.random.key(1)})
ckpt = Checkpointer()
ckpt.track(state=state)
ckpt.progress.update(losses=[])
step = ckpt.restore()
per_epoch = -(-len(xs) // 8)
for epoch in range(step // per_epoch, 4):
    perm = np.random.default_rng([7, epoch]).permutation(len(xs))
    for i in range(step % per_epoch, per_epoch):
        idx = perm[8 * i : 8 * i + 8]
        s = state.value
        params, opt_state, key, loss = update(s["params"], s["opt"], s["key"], xs[idx], ys[idx])
        state.value = {"params": params, "opt": opt_state, "key": key}
        ckpt.progress["losses"].append(float(loss))
        step += 1
        ckpt.step(step)
with open("result.json", "w") as f:
    json.dump([jax.tree.map(lambda a: np.asarray(a).tolist(), state.value["params"]), ckpt.progress["losses"]], f)
