"""Pure functions on trees of parameters, as with optax: the state of the optimizer is a named tuple."""

import json
from collections import namedtuple
from pathlib import Path

import numpy as np

from mizzen import Checkpointer

Adam = namedtuple("Adam", "count mu nu")


def init(params):
    return Adam(0, {k: np.zeros_like(v) for k, v in params.items()}, {k: np.zeros_like(v) for k, v in params.items()})


def update(gradients, state):
    count = state.count + 1
    mu = {k: 0.9 * state.mu[k] + 0.1 * g for k, g in gradients.items()}
    nu = {k: 0.99 * state.nu[k] + 0.01 * g * g for k, g in gradients.items()}
    steps = {k: -0.02 * mu[k] / (1 - 0.9**count) / (np.sqrt(nu[k] / (1 - 0.99**count)) + 1e-8) for k in gradients}
    return steps, Adam(count, mu, nu)


def gradients_of(params, x, y):
    error = x @ params["w"] + params["b"] - y
    return {"w": x.T @ error / len(x), "b": error.mean(axis=0)}


rng = np.random.default_rng(0)
data = rng.normal(size=(128, 4)).astype(np.float32)
truth = data @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
held = {"params": {"w": np.zeros((4, 1), np.float32), "b": np.zeros(1, np.float32)}}
held["optimizer"] = init(held["params"])
key = np.random.Philox(42)

checkpointer = Checkpointer()
checkpointer.track(train=held, key=key)
for step in range(checkpointer.restore(), 40):
    draws = np.random.Generator(key)
    rows = draws.integers(0, 128, 16)
    noise = draws.normal(scale=0.1, size=(16, 1)).astype(np.float32)
    steps, held["optimizer"] = update(gradients_of(held["params"], data[rows], truth[rows] + noise), held["optimizer"])
    held["params"] = {k: v + steps[k] for k, v in held["params"].items()}
    checkpointer.step(step + 1)

result = {k: v.tolist() for k, v in held["params"].items()} | {"count": held["optimizer"].count}
Path("result.json").write_text(json.dumps(result))
