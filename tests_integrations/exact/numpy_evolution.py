"""An evolution strategy with antithetic samples, a legacy RandomState, and a step size that adapts."""

import json
from pathlib import Path

import numpy as np

from mizzen import Checkpointer


class Evolution:
    def __init__(self, size, seed):
        self.random = np.random.RandomState(seed)
        self.mean, self.sigma, self.best = np.ones(size), 0.5, float("inf")

    def ask(self):
        half = self.random.randn(6, len(self.mean))
        self.noise = np.concatenate([half, -half])
        return self.mean + self.sigma * self.noise

    def tell(self, scores):
        ranks = np.argsort(np.argsort(scores)) / (len(scores) - 1) - 0.5
        self.mean = self.mean - 0.2 * (ranks @ self.noise) / self.sigma / len(scores)
        self.sigma *= 1.05 if scores.min() < self.best else 0.95
        self.best = min(self.best, float(scores.min()))

    def state_dict(self):
        return {"mean": self.mean, "sigma": self.sigma, "best": self.best}

    def load_state_dict(self, state):
        self.mean, self.sigma, self.best = state["mean"].copy(), float(state["sigma"]), state["best"]


evolution = Evolution(5, 1)
checkpointer = Checkpointer()
checkpointer.track(evolution=evolution, random=evolution.random)
for step in range(checkpointer.restore(), 50):
    points = evolution.ask()
    evolution.tell((points**2).sum(axis=1) + 0.1 * np.sin(7 * points).sum(axis=1))
    checkpointer.step(step + 1)

Path("result.json").write_text(json.dumps([evolution.mean.tolist(), evolution.sigma, evolution.best]))
