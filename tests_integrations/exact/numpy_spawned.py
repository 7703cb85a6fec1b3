"""Generators that are spawned from one of the script in each step."""

import json
from pathlib import Path

import numpy as np

from mizzen import Checkpointer

root = np.random.default_rng(5)
state = {"w": np.zeros(4), "best": 1e9}
checkpointer = Checkpointer()
checkpointer.track(state=state, root=root)
for step in range(checkpointer.restore(), 30):
    losses = []
    for child in root.spawn(3):
        noise = child.normal(size=4)
        losses.append((float(((state["w"] + 0.1 * noise - 1) ** 2).sum()), noise))
    loss, noise = min(losses, key=lambda one: one[0])
    if loss < state["best"]:
        state["best"] = loss
        state["w"] = state["w"] + 0.1 * noise
    checkpointer.step(step + 1)
Path("result.json").write_text(json.dumps([state["w"].tolist(), state["best"]]))
