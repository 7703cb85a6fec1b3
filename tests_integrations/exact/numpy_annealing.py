"""Simulated annealing with two generators, one of Python and one of numpy, and a history of what was accepted."""

import json
import random
from pathlib import Path

import numpy as np

from mizzen import Checkpointer

cities = np.random.default_rng(8).random((15, 2))
chooser = random.Random(1)
noise = np.random.Generator(np.random.PCG64DXSM(2))
tour = {"order": list(range(15)), "accepted": []}


def length(order):
    return float(np.linalg.norm(cities[order] - cities[np.roll(order, 1)], axis=1).sum())


checkpointer = Checkpointer()
checkpointer.track(tour=tour, chooser=chooser, noise=noise)
for step in range(checkpointer.restore(), 80):
    low, high = sorted(chooser.sample(range(15), 2))
    turned = tour["order"][:low] + tour["order"][low:high][::-1] + tour["order"][high:]
    gain = length(tour["order"]) - length(turned)
    if gain > 0 or noise.random() < np.exp(gain * (1 + step / 8)):
        tour["order"] = turned
        tour["accepted"].append(step)
    checkpointer.step(step + 1)

Path("result.json").write_text(json.dumps(tour))
