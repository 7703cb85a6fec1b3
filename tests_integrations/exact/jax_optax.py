"""A jitted update with dropout, clipping and a warm-up; the order of each epoch from its number."""

import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mizzen
from mizzen.integrations.jax import Pytree

X = np.random.RandomState(0).randn(80, 4).astype("float32")
Y = np.sin(X.sum(1, keepdims=True))
sched = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 40)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(sched))


def init(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (4, 16)) * 0.5, "w2": jax.random.normal(k2, (16, 1)) * 0.3}


@jax.jit
def train_step(state, x, y):
    params, opt_state, key, ema = state
    key, sub = jax.random.split(key)

    def loss_fn(p):
        h = jnp.tanh(x @ p["w1"])
        h = h * jax.random.bernoulli(sub, 0.9, h.shape) / 0.9
        return jnp.mean((h @ p["w2"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    ema = optax.incremental_update(params, ema, 0.1)
    return (params, opt_state, key, ema), loss


def batches(epoch, start, batch_size=16):
    perm = np.random.RandomState(epoch).permutation(len(X))
    for i in range(start * batch_size, len(X), batch_size):
        yield X[perm[i : i + batch_size]], Y[perm[i : i + batch_size]]


params = init(jax.random.PRNGKey(0))
train = Pytree((params, tx.init(params), jax.random.PRNGKey(1), params))
ckpt = mizzen.Checkpointer()
ckpt.track(train=train)
step = ckpt.restore()
per_epoch = len(X) // 16
for epoch in range(step // per_epoch, 8):
    losses = []
    for x, y in batches(epoch, step % per_epoch):
        train.value, loss = train_step(train.value, x, y)
        losses.append(loss)
        step += 1
        ckpt.step(step)
    print(epoch, sum(losses) / max(1, len(losses)))
with open("result.json", "w") as f:
    json.dump(jax.tree.map(lambda a: np.asarray(a).tolist(), (train.value[0], train.value[3])), f)
