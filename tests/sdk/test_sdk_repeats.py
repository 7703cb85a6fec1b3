"""Loops of scripts without torch: they resume exactly, or a warning before the first save says what to do.

Each script is the head and one of the bodies. It is killed after some steps by an exception that it does not catch, and
started again.
"""

import re
from pathlib import Path

import pytest

from tests.sdk.killed_scripts import run_until_killed

HEAD = """
import random
import numpy as np
from mizzen import Checkpointer

rng = np.random.default_rng(0)
inputs = rng.normal(size=(24, 3))
targets = inputs @ np.array([1.0, -2.0, 0.5])
state = {"w": np.zeros(3), "v": np.zeros(3)}
checkpointer = Checkpointer("ckpt", interval_s=0)


def update(rows):
    error = inputs[rows] @ state["w"] - targets[rows]
    state["v"] = 0.9 * state["v"] + inputs[rows].T @ error / len(rows)
    state["w"] = state["w"] - 0.05 * state["v"]
    killed()
    return float((error**2).mean())


"""
TRACK = "checkpointer.track(state=state)\n"
HISTORY = """
class Draw:
    def __init__(self): self.rng = np.random.default_rng(1)
    def rows(self): return self.rng.integers(0, 24, 5)
class History:
    def __init__(self): self.losses, self.most = [], 0.0
    def add(self, loss): self.losses.append(loss); self.most = max(self.most, loss)
    def factor(self): return 1 / (1 + np.mean(self.losses) / (1 + self.most))
    def scale(self, state): state["w"] = state["w"] * self.factor()
    def clear(self): self.losses, self.most = [], 0.0
history = History()
"""
FOLD = """
def train(checkpointer, fold):
    state = {"w": np.zeros(3)}
    checkpointer.track(state=state)
    for step in range(checkpointer.restore(), 3):
        rows = np.random.permutation(20)[fold::4]
        state["w"] = state["w"] + 0.01 * inputs[rows].mean(0)
        killed(); checkpointer.step(step + 1)
    return state["w"]
"""
SCALED = "history.add(update(rows)); state['w'] = state['w'] * history.factor()"


def loop(statements: str) -> str:
    """Returns a loop of 12 steps, which begins at the restored one."""
    return f"for step in range(checkpointer.restore(), 12):\n    {statements}\n    checkpointer.step(step + 1)"


EXACT = {
    "folds with their own roots": FOLD
    + """state["w"] = np.zeros((4, 3))
for fold in range(4):
    state["w"][fold] = train(Checkpointer(f"ckpt/{fold}", interval_s=0), fold)""",
    "attempts": FOLD
    + """for attempt in range(4):
    try:
        state["w"] = train(Checkpointer("ckpt", interval_s=0), 0); print(attempt); break
    except OSError: pass""",
    "global generators": TRACK
    + """for step in range(checkpointer.restore(), 12):
    update(np.random.permutation(24)[: random.randint(2, 9)])
    checkpointer.step(step + 1)""",
    "tracked generator": """checkpointer.track(state=state, generator=rng)
step = checkpointer.restore()
while step < 12:
    update(rng.integers(0, 24, 5)); step += 1; checkpointer.step(step)""",
    "generator of an epoch": TRACK
    + """step = checkpointer.restore()
for epoch in range(step // 4, 3):
    order = np.random.default_rng(epoch).permutation(24)
    for i in range(step % 4, 4):
        update(order[i * 6 : i * 6 + 6]); step += 1; checkpointer.step(step)""",
    "generator made in the loop": TRACK
    + """for step in range(checkpointer.restore(), 12):
    rng = np.random.default_rng([7, step])
    update(rng.integers(0, 24, 5)); checkpointer.step(step + 1)""",
    "seeded in each epoch": TRACK
    + """step = checkpointer.restore()
for epoch in range(step // 4, 3):
    np.random.seed(epoch)
    order = np.random.permutation(24)
    for i in range(step % 4, 4):
        update(order[i * 6 : i * 6 + 6]); step += 1; checkpointer.step(step)""",
    "order saved by epoch": TRACK
    + """for epoch in range(checkpointer.restore(), 3):
    order = np.random.permutation(24)
    for i in range(4):
        update(order[i * 6 : i * 6 + 6])
    checkpointer.step(epoch + 1)""",
    "draws repeated": TRACK
    + """done = checkpointer.restore()
for _ in range(done):
    rng.integers(0, 24, 5)
for step in range(done, 12):
    update(rng.integers(0, 24, 5)); checkpointer.step(step + 1)""",
    "passed over": TRACK
    + """done = checkpointer.restore()
for step in range(12):
    rows = rng.integers(0, 24, 5)
    if step < done:
        continue
    update(rows); checkpointer.step(step + 1)""",
    "generator's state in progress": TRACK
    + """checkpointer.progress["rng"] = rng.bit_generator.state
step = checkpointer.restore()
rng.bit_generator.state = checkpointer.progress["rng"]
while step < 12:
    update(rng.integers(0, 24, 5)); step += 1
    checkpointer.progress["rng"] = rng.bit_generator.state
    checkpointer.step(step)""",
    "pair of functions": """w, count = np.zeros(3), 0
def save():
    return {"w": w.copy(), "count": count, "rng": rng.bit_generator.state}
def load(saved):
    global w, count
    w, count, rng.bit_generator.state = saved["w"], saved["count"], saved["rng"]
checkpointer.track(everything=(save, load), state=state)
checkpointer.restore()
while count < 12:
    rows = rng.integers(0, 24, 5)
    if (w**2).sum() < 4:
        w = w + 0.01 * inputs[rows].mean(0)
    update(rows); count += 1; checkpointer.step(count)""",
    "object with a generator": """class Sampler:
    def __init__(self, rng): self.rng, self.best = rng, 9.0
    def state_dict(self): return {"rng": self.rng.bit_generator.state, "best": self.best}
    def load_state_dict(self, saved): self.rng.bit_generator.state, self.best = saved["rng"], saved["best"]
    def train(self, step):
        while step < 12:
            loss = update(rng.integers(0, 24, 5))
            if loss < self.best:
                self.best = loss
                state["v"] = state["v"] * 0.5
            step += 1; checkpointer.step(step)
sampler = Sampler(rng)
checkpointer.track(state=state, sampler=sampler)
sampler.train(checkpointer.restore())""",
    "shown attributes": TRACK
    + """class Trainer:
    def __init__(self): self.total = self.seen = 0
    def train(self, step):
        while step < 12:
            self.total += update(np.random.randint(0, 24, 5)); self.seen += 5; step += 1
            if self.seen % 10 == 0:
                print(step, self.total / self.seen)
            checkpointer.step(step)
Trainer().train(checkpointer.restore())""",
    "restored attribute": TRACK
    + """class Trainer:
    def __init__(self): self.step = checkpointer.restore()
    def one(self):
        update(np.random.randint(0, 24, 5 + self.step % 2)); self.step += 1; checkpointer.step(self.step)
    def train(self):
        while self.step < 12: self.one()
Trainer().train()""",
    "chunks": TRACK
    + """step = checkpointer.restore()
while step < 12:
    for _ in range(4):
        update(np.random.randint(0, 24, 5)); step += 1; checkpointer.step(step)
        if step == 12: break
    print(step)""",
    "chunks in a function": TRACK
    + """class Trainer:
    def __init__(self): self.step = checkpointer.restore()
    def train(self, steps):
        for _ in range(steps):
            update(np.random.randint(0, 24, 5)); self.step += 1; checkpointer.step(self.step)
trainer = Trainer()
while trainer.step < 12:
    trainer.train(min(5, 12 - trainer.step))""",
    "callbacks": TRACK
    + """class Trainer:
    def __init__(self, hooks): self.hooks, self.step = hooks, checkpointer.restore()
    def train(self):
        while self.step < 12:
            update(np.random.randint(0, 24, 5)); self.step += 1
            for hook in self.hooks: hook(self)
Trainer([lambda one: None, lambda one: checkpointer.step(one.step)]).train()""",
    "tracked objects": HISTORY
    + """draw = Draw()
checkpointer.track(state=state, history=history, draw=draw)
step = checkpointer.restore()
while step < 12:
    history.add(update(draw.rows())); state["w"] = state["w"] * history.factor(); step += 1; checkpointer.step(step)""",
    "shown objects": HISTORY
    + TRACK
    + """step = checkpointer.restore()
while step < 12:
    history.add(update(np.random.randint(0, 24, 5))); print(history.factor()); step += 1; checkpointer.step(step)""",
    "cleared in each pass": HISTORY
    + TRACK
    + """rows = []
step = checkpointer.restore()
while step < 12:
    history.clear()
    for _ in range(2):
        rows.append(random.randrange(24)); history.add(update(rows))
    state["w"] = state["w"] * history.factor(); step += 1; checkpointer.step(step)
    rows.clear()""",
    "filled in each pass": TRACK
    + """rows, slow = np.zeros(4, int), {}
def slowly(i):
    if i not in slow: slow[i] = 0.9**i
    return slow[i]
step = checkpointer.restore()
while step < 12:
    for i in range(4):
        rows[i] = random.randrange(24)
    update(rows); state["w"] = state["w"] * slowly(step % 3); step += 1; checkpointer.step(step)""",
}
ADVICE = {
    "folds at one root": (
        FOLD + "for fold in range(4): train(Checkpointer('ckpt', interval_s=0), fold)",
        r'each pass of this loop would continue .* Checkpointer\(f"{root}/{fold}"\)',
    ),
    "steps": (
        TRACK
        + """checkpointer.restore()
for step in range(12):
    update(np.random.randint(0, 24, 5)); checkpointer.step(step + 1)""",
        r"this loop would begin again.*range\(checkpointer.restore\(\), steps\)",
    ),
    "generator": (
        TRACK
        + """step = checkpointer.restore()
while step < 12:
    update(rng.integers(0, 24, 5)); step += 1; checkpointer.step(step)""",
        r"checkpointer.track\(generator=rng\)",
    ),
    "order of an epoch": (
        TRACK
        + """step = checkpointer.restore()
for epoch in range(step // 4, 3):
    order = np.random.permutation(24)
    for i in range(step % 4, 4):
        update(order[i * 6 : i * 6 + 6]); step += 1; checkpointer.step(step)""",
        "order is drawn again",
    ),
    "order of an epoch in a function": (
        """checkpointer.track(state=state, generator=rng)
def train(step):
    order = rng.permutation(24)
    for i in range(step % 4, 4):
        update(order[i * 6 : i * 6 + 6]); step += 1; checkpointer.step(step)
    return step
step = checkpointer.restore()
while step < 12:
    step = train(step)""",
        "order is drawn again",
    ),
    "generator in a function": (
        TRACK
        + """draw = random.Random(1)
def rows(): return [draw.randrange(24) for _ in range(5)]
for step in range(checkpointer.restore(), 12):
    update(rows()); checkpointer.step(step + 1)""",
        r"checkpointer.track\(generator=draw\)",
    ),
    "generator of a trainer": (
        TRACK
        + """class Trainer:
    def __init__(self): self.rng = np.random.RandomState(0)
    def train(self, step):
        for step in range(step, 12):
            update(self.rng.randint(0, 24, 5)); checkpointer.step(step + 1)
Trainer().train(checkpointer.restore())""",
        r"checkpointer.track\(generator=self.rng\)",
    ),
    "rate": (
        TRACK
        + """rate = 1.0
for step in range(checkpointer.restore(), 12):
    rate *= 0.9
    update(np.random.randint(0, 24, 5)); state["w"] *= rate
    checkpointer.step(step + 1)""",
        r'checkpointer.progress\["rate"\]',
    ),
    "objects": (
        HISTORY + TRACK + "draw = Draw()\n" + loop("rows = draw.rows(); " + SCALED),
        r"track\(draw=draw\)\. history, .*track\(history=history\)",
    ),
    "object with a condition": (
        HISTORY
        + TRACK
        + loop("history.add(update([step]))\n    if history.factor() < 0.9:\n        state['v'] *= 0.5"),
        r"track\(history=history\)",
    ),
    "object that changes a tracked one": (
        HISTORY + TRACK + loop("history.add(update([step])); history.scale(state)"),
        r"track\(history=history\)",
    ),
    "closure": (
        TRACK
        + """def averaging():
    mean = 0.0
    def average(loss):
        nonlocal mean
        mean = 0.9 * mean + 0.1 * loss
        return mean
    return average
average = averaging()
"""
        + loop("update([step]); state['w'] = state['w'] / (1 + average(random.random()))"),
        r'progress\["average"\]',
    ),
    "global variable of a function": (
        TRACK
        + """calls = 0
def rate():
    global calls
    calls += 1
    return 0.9**calls
"""
        + loop("update([step]); state['w'] = state['w'] * rate()"),
        r'progress\["calls"\]',
    ),
    "attribute of a function": (
        TRACK
        + """def rate():
    rate.value *= 0.9
    return rate.value
rate.value = 1.0
"""
        + loop("update([step]); state['w'] = state['w'] * rate()"),
        r"track\(rate=vars\(rate\)\)",
    ),
    "last value in a list": (
        TRACK
        + """last = [0.0]
def train(step):
    loss = update([step]) + last[0]
    state["w"] = state["w"] / (1 + loss)
    last[0] = loss
"""
        + loop("train(step)"),
        r'progress\["last"\]',
    ),
    "items": (
        "weights = np.ones(3)\n"
        + TRACK
        + loop("weights[step % 3] = update([step]); state['w'] = state['w'] / (1 + weights.sum())"),
        r'track\(weights=\{"weights": weights\}\)',
    ),
    "settings": (
        "import argparse\nargs = argparse.Namespace(rate=1.0)\n"
        + TRACK
        + loop("args.rate = max(0.1, args.rate * 0.9); update([step]); state['w'] = state['w'] * args.rate"),
        r"track\(args=vars\(args\)\)",
    ),
}


def run(body: str, folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    """Runs a script until it has trained `steps` steps. Returns whether it has ended, and its warnings."""
    seeds = "import random, numpy\nrandom.seed(3); numpy.random.seed(3)\n"
    return run_until_killed(seeds + HEAD + body + "\nnp.savez('end.npz', **state)\n", folder, steps, monkeypatch)


@pytest.mark.parametrize("name", EXACT)
def test_it_is_exact_and_not_warned_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed again and again, a script ends as without kills."""
    assert run(EXACT[name], tmp_path / "whole", 0, monkeypatch) == (True, [])
    for limit in (3, 5, 2, 0):
        has_ended, told = run(EXACT[name], tmp_path / "killed", limit, monkeypatch)
        assert not told
    assert has_ended
    assert (tmp_path / "killed/end.npz").read_bytes() == (tmp_path / "whole/end.npz").read_bytes()


@pytest.mark.parametrize("name", ADVICE)
def test_what_a_restart_would_not_continue_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes once, before the first save, and names the line that repairs it."""
    body, advice = ADVICE[name]
    _, told = run(body, tmp_path / "whole", 7, monkeypatch)
    assert len(told) == 1 and "would not continue exactly" in told[0]
    assert re.search(advice, told[0])
