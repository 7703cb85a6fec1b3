"""Logistic regression in numpy: minibatches, dropout and noise from numpy's global generator."""

import json
from pathlib import Path

import numpy as np

from mizzen import Checkpointer

np.random.seed(7)
inputs = np.random.randn(200, 6)
labels = (inputs @ np.arange(6) + np.random.randn(200) > 0).astype(float)
state = {"weights": np.zeros(6), "velocity": np.zeros(6)}

checkpointer = Checkpointer()
checkpointer.track(state=state)
step = checkpointer.restore()
while step < 60:
    rows = np.random.choice(200, 16)
    batch = inputs[rows] * (np.random.rand(16, 6) > 0.2)
    guess = 1 / (1 + np.exp(-batch @ state["weights"]))
    gradient = batch.T @ (guess - labels[rows]) / 16 + 0.01 * np.random.randn(6)
    state["velocity"] = 0.9 * state["velocity"] + gradient
    state["weights"] = state["weights"] - 0.1 * state["velocity"]
    step += 1
    checkpointer.step(step)

Path("result.json").write_text(json.dumps({name: value.tolist() for name, value in state.items()}))
