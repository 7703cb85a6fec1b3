"""A network in numpy with a generator of its own, whose epochs are permutations; Adam as a function."""

import json
from pathlib import Path

import numpy as np

from mizzen import Checkpointer

rng = np.random.default_rng(3)
inputs = rng.normal(size=(96, 5))
targets = np.sin(inputs.sum(axis=1, keepdims=True))
params = {"w1": rng.normal(size=(5, 8)) * 0.5, "w2": rng.normal(size=(8, 1)) * 0.5}
moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
progress = {"epoch": 0, "order": [], "losses": []}


def adam(name, gradient, t):
    m, v = moments[name]
    m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
    moments[name] = m, v
    return 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


checkpointer = Checkpointer()
checkpointer.track(params=params, moments=moments, generator=rng, progress=progress)
step = checkpointer.restore()
while progress["epoch"] < 5:
    if not progress["order"]:
        progress["order"] = rng.permutation(96).tolist()
    rows, progress["order"] = progress["order"][:12], progress["order"][12:]
    progress["epoch"] += not progress["order"]
    x = inputs[rows] + 0.05 * rng.normal(size=(12, 5))
    hidden = np.tanh(x @ params["w1"]) * (rng.random((12, 8)) > 0.1)
    error = hidden @ params["w2"] - targets[rows]
    gradients = {"w2": hidden.T @ error / 12, "w1": x.T @ ((error @ params["w2"].T) * (1 - hidden**2)) / 12}
    step += 1
    for name, gradient in gradients.items():
        params[name] = params[name] - adam(name, gradient, step)
    progress["losses"].append(float((error**2).mean()))
    checkpointer.step(step)

Path("result.json").write_text(json.dumps([progress, {name: value.tolist() for name, value in params.items()}]))
