"""A stream with a shuffle buffer, whose state the dataset gives itself; steps instead of epochs."""

import random

import torch
from torch import nn
from torch.utils.data import IterableDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Shuffled(IterableDataset):
    def __init__(self, n, buffer_size, seed):
        self.n, self.buffer_size, self.seed, self.epoch = n, buffer_size, seed, 0
        self.rng, self.buffer, self.at = random.Random(seed), [], 0

    def __iter__(self):
        while self.at < self.n or self.buffer:
            while self.at < self.n and len(self.buffer) < self.buffer_size:
                self.buffer.append(self.at)
                self.at += 1
            i = self.buffer.pop(self.rng.randrange(len(self.buffer)))
            yield torch.sin(torch.arange(6.0) * i), torch.tensor([i / self.n])
        self.at = 0

    def state_dict(self):
        return {"rng": self.rng.getstate(), "buffer": list(self.buffer), "at": self.at}

    def load_state_dict(self, state):
        self.rng.setstate(state["rng"])
        self.buffer, self.at = list(state["buffer"]), state["at"]


torch.manual_seed(4)
loader = ResumableLoader(Shuffled(50, 12, 3), batch_size=4)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
ckpt = Checkpointer()
ckpt.track(model=model, optimizer=optimizer, loader=loader)
step, max_steps = ckpt.restore(), 32
while step < max_steps:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x + 0.01 * torch.randn_like(x)), y).backward()
        optimizer.step()
        step += 1
        ckpt.step(step)
        if step >= max_steps:
            break
torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")
