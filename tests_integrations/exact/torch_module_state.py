"""A module with a state that no `state_dict` has: hidden state, counter, temperature, history, generators, a teacher."""

from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Meter:
    def __init__(self):
        self.sum, self.n = 0.0, 0

    def update(self, v):
        self.sum += float(v)
        self.n += 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.drop, self.bn = nn.GRUCell(6, 8), nn.Linear(8, 2), nn.Dropout(0.1), nn.BatchNorm1d(8)
        teacher = nn.Linear(8, 2)
        teacher.load_state_dict(self.out.state_dict())
        self.teacher = [teacher]
        self.hidden, self.calls, self.tau = None, 0, 1.0
        self.history, self.meter = deque(maxlen=5), Meter()
        self.rng, self.gen = np.random.default_rng(3), torch.Generator().manual_seed(4)
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, x):
        self.calls += 1
        h = self.cell(x, torch.zeros(len(x), 8) if self.hidden is None else self.hidden)
        self.hidden = h.detach()
        self.scale.mul_(0.99)
        h = self.drop(self.bn(h * self.scale)) + 0.01 * torch.randn(8, generator=self.gen)
        out = (self.out(h) + 0.01 * float(self.rng.normal())) / self.tau
        with torch.no_grad():
            soft = self.teacher[0](h)
        self.meter.update(out.sum())
        self.history.append(out.detach().mean())
        if self.calls % 3 == 0:
            self.tau *= 0.95
        return out, soft, 1e-3 * (self.meter.sum / self.meter.n + sum(self.history))

    def update_teacher(self):
        for t, s in zip(self.teacher[0].parameters(), self.out.parameters()):
            t.data.mul_(0.9).add_(s.data, alpha=0.1)


torch.manual_seed(0)
loader = ResumableLoader(TensorDataset(torch.randn(32, 6), torch.randint(0, 2, (32,))), batch_size=8, shuffle=True)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ckpt = Checkpointer()
ckpt.track(model=model, opt=opt, loader=loader)
step = ckpt.restore()
for epoch in range(loader.epoch, 5):
    model.train()
    model.hidden = None
    if epoch >= 2:
        model.bn.eval()
    for x, y in loader:
        out, soft, extra = model(x)
        loss = F.cross_entropy(out, y) * (1 + extra) + F.mse_loss(out, soft)
        opt.zero_grad()
        loss.backward()
        opt.step()
        model.update_teacher()
        step += 1
        ckpt.step(step)
torch.save([model.state_dict(), model.calls, model.tau, model.meter.sum, model.teacher[0].state_dict()], "model.pt")
