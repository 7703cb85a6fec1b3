"""Q-learning with a replay buffer in a deque, an environment with a state, and random actions."""

import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn

from mizzen import Checkpointer


class Env:
    def __init__(self):
        self.rng = np.random.RandomState(0)
        self.reset()

    def reset(self):
        self.s, self.t = self.rng.uniform(-1, 1, 3).astype(np.float32), 0
        return self.s

    def step(self, a):
        self.s = (0.9 * self.s + 0.1 * (a - 0.5) + 0.05 * self.rng.randn(3)).astype(np.float32)
        self.t += 1
        return self.s, float(-abs(self.s).sum()), self.t >= 10

    def state_dict(self):
        return {"rng": self.rng.get_state(legacy=False), "s": self.s, "t": self.t}

    def load_state_dict(self, d):
        self.rng.set_state(d["rng"])
        self.s, self.t = np.array(d["s"]), d["t"]


random.seed(1)
torch.manual_seed(1)
env = Env()
q, target = nn.Linear(3, 2), nn.Linear(3, 2)
target.load_state_dict(q.state_dict())
optim = torch.optim.Adam(q.parameters(), lr=1e-2)
memory = {"replay": deque(maxlen=50), "returns": [], "episode_return": 0.0}
ckpt = Checkpointer()
ckpt.track(env=env, q=q, target=target, optim=optim, memory=memory)
step = ckpt.restore()
while step < 80:
    state = env.s
    eps = max(0.05, 1 - step / 60)
    if random.random() < eps:
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = int(q(torch.from_numpy(state)).argmax())
    nxt, reward, done = env.step(action)
    memory["replay"].append((state.tolist(), action, reward, nxt.tolist(), done))
    memory["episode_return"] += reward
    if done:
        memory["returns"].append(memory["episode_return"])
        memory["episode_return"] = 0.0
        env.reset()
    if len(memory["replay"]) >= 8:
        s, a, r, n, d = zip(*random.sample(list(memory["replay"]), 8))
        s, n = torch.tensor(s), torch.tensor(n)
        with torch.no_grad():
            y = torch.tensor(r) + 0.9 * target(n).max(1).values * (1 - torch.tensor(d).float())
        loss = nn.functional.smooth_l1_loss(q(s).gather(1, torch.tensor(a)[:, None])[:, 0], y)
        optim.zero_grad()
        loss.backward()
        optim.step()
    if step % 10 == 0:
        target.load_state_dict(q.state_dict())
    step += 1
    ckpt.step(step)
torch.save([q.state_dict(), memory["returns"]], "model.pt")
