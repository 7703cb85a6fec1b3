"""An estimator with `partial_fit`, as in scikit-learn: tracked as a pair of functions; plateau and early stopping."""

import json
from pathlib import Path

import numpy as np

from mizzen import Checkpointer


class SGDRegressor:
    def __init__(self, rate=0.05, seed=0):
        self.rate, self.random_state = rate, np.random.RandomState(seed)
        self.coef_, self.t_ = None, 0

    def partial_fit(self, inputs, targets):
        if self.coef_ is None:
            self.coef_ = np.zeros(inputs.shape[1])
        for row in self.random_state.permutation(len(inputs)):
            self.t_ += 1
            self.coef_ -= self.rate / self.t_**0.25 * (inputs[row] @ self.coef_ - targets[row]) * inputs[row]

    def score(self, inputs, targets):
        return float(((inputs @ self.coef_ - targets) ** 2).mean())


def save():
    coef = None if model.coef_ is None else model.coef_.copy()
    return {"coef": coef, "t": model.t_, "rate": model.rate, "random": model.random_state.get_state(legacy=False)}


def load(state):
    model.coef_, model.t_, model.rate = state["coef"], state["t"], state["rate"]
    model.coef_ = None if model.coef_ is None else model.coef_.copy()
    model.random_state.set_state(state["random"])


np.random.seed(0)
inputs = np.random.randn(120, 4)
targets = inputs @ np.array([1.0, 2.0, -1.0, 0.0]) + 0.3 * np.random.randn(120)
model = SGDRegressor()
progress = {"best": float("inf"), "waited": 0, "scores": []}

checkpointer = Checkpointer()
checkpointer.track(model=(save, load), progress=progress)
step = checkpointer.restore()
while step < 40 and progress["waited"] < 12:
    rows = np.random.permutation(100)[:20]
    model.partial_fit(inputs[rows], targets[rows] + 0.05 * np.random.randn(20))
    score = model.score(inputs[100:], targets[100:])
    progress["scores"].append(score)
    if score < progress["best"]:
        progress["best"], progress["waited"] = score, 0
    else:
        progress["waited"] += 1
        if progress["waited"] % 3 == 0:
            model.rate *= 0.5
    step += 1
    checkpointer.step(step)

Path("result.json").write_text(json.dumps([model.coef_.tolist(), progress]))
