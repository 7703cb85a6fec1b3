"""Minibatch k-means: epochs of batches from a generator function that takes a position; centres replaced when empty."""

import json
from pathlib import Path

import numpy as np

from mizzen import Checkpointer


def batches(points, epoch, position):
    order = np.random.default_rng([5, epoch]).permutation(len(points))
    for start in range(position, len(points), 10):
        yield points[order[start : start + 10]], start + 10


np.random.seed(9)
points = np.concatenate([np.random.randn(40, 2) + centre for centre in ([0, 0], [4, 4], [0, 5])])
state = {"centres": points[np.random.choice(120, 3)], "counts": np.ones(3)}
progress = {"epoch": 0, "position": 0}

checkpointer = Checkpointer()
checkpointer.track(state=state, progress=progress)
step = checkpointer.restore()
while progress["epoch"] < 4:
    for batch, position in batches(points, progress["epoch"], progress["position"]):
        batch = batch + 0.05 * np.random.randn(*batch.shape)
        nearest = ((batch[:, None] - state["centres"]) ** 2).sum(-1).argmin(1)
        for point, centre in zip(batch, nearest, strict=True):
            state["counts"][centre] += 1
            state["centres"][centre] += (point - state["centres"][centre]) / state["counts"][centre]
        if np.random.rand() < 0.1:
            state["centres"][np.random.randint(3)] = points[np.random.randint(120)]
        progress["position"] = position
        if position >= len(points):
            progress.update(epoch=progress["epoch"] + 1, position=0)
        step += 1
        checkpointer.step(step)

Path("result.json").write_text(json.dumps([state["centres"].tolist(), state["counts"].tolist(), progress]))
