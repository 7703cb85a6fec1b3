"""A momentum encoder with a queue of negatives in buffers, an engine with handlers of events, and a worker."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class TwoViews(Dataset):
    def __init__(self):
        self.data = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 40

    def __getitem__(self, i):
        noisy = lambda: self.data[i] * (torch.rand(8) > 0.2) + 0.1 * torch.randn(8)
        return noisy(), noisy()


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 32), dim=0))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            for p, s in zip(self.k.parameters(), self.q.parameters()):
                p.mul_(0.9).add_(s, alpha=0.1)
            k = F.normalize(self.k(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        ptr = int(self.ptr)
        self.queue[:, ptr : ptr + len(k)] = k.T
        self.ptr.fill_((ptr + len(k)) % 32)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


class Meter:
    def __init__(self):
        self.sum = self.n = 0

    def add(self, v):
        self.sum, self.n = self.sum + v, self.n + 1

    @property
    def mean(self):
        return self.sum / self.n


class Engine:
    def __init__(self, step):
        self.callbacks = {"iteration": [], "epoch": []}
        self.step = step

    def on(self, event):
        return lambda f: self.callbacks[event].append(f) or f

    def run(self, loader, epochs):
        for self.epoch in range(loader.epoch, epochs):
            self.meter = Meter()
            for self.batch in loader:
                self.meter.add(self.step(self.batch))
                for f in self.callbacks["iteration"]:
                    f(self)
            for f in self.callbacks["epoch"]:
                f(self)


torch.manual_seed(0)
loader = ResumableLoader(TwoViews(), batch_size=8, shuffle=True, num_workers=1)
model = MoCo()
opt = torch.optim.SGD(model.q.parameters(), lr=0.05, momentum=0.9)
sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
ckpt = Checkpointer()
ckpt.track(model=model, opt=opt, sched=sched, loader=loader)
n = ckpt.restore()


def update(batch):
    opt.zero_grad()
    loss = model(*batch)
    loss.backward()
    opt.step()
    return loss.item()


engine = Engine(update)


@engine.on("iteration")
def save(e):
    global n
    n += 1
    ckpt.step(n)


@engine.on("epoch")
def schedule(e):
    sched.step()
    print(e.epoch, e.meter.mean if e.meter.n else "resumed")


engine.run(loader, 4)
torch.save([model.state_dict(), opt.state_dict(), sched.state_dict()], "model.pt")
