"""Alternating least squares: the factors are results of a solver, transposed, so they are in Fortran's order."""

import json
from pathlib import Path

import numpy as np

from mizzen import Checkpointer


class Scales:
    def __init__(self):
        self.basis = np.ones((9, 40))

    def update(self, users, items):
        self.basis = (items @ np.cov(users.T)).T / (1 + abs(self.basis.mean()))


rng = np.random.default_rng(3)
ratings = rng.normal(size=(60, 9)) @ rng.normal(size=(9, 40)) + 0.1 * rng.normal(size=(60, 40))
factors, scales = {"users": rng.normal(size=(60, 9)), "items": rng.normal(size=(40, 9))}, Scales()
checkpointer = Checkpointer()
checkpointer.track(factors=factors, scales=scales)
for step in range(checkpointer.restore(), 25):
    shown = np.random.rand(60, 40) < 0.8
    items = factors["items"] / factors["items"].std(0)
    ridge = items.T @ items + np.eye(9)
    factors["users"] = np.linalg.solve(ridge, items.T @ (ratings * shown).T).T
    users = factors["users"]
    factors["items"] = np.linalg.solve(users.T @ users + np.eye(9), users.T @ (ratings * shown)).T
    scales.update(users, factors["items"])
    checkpointer.step(step + 1)
result = [factors["users"].tolist(), factors["items"].tolist(), scales.basis.tolist()]
Path("result.json").write_text(json.dumps(result))
