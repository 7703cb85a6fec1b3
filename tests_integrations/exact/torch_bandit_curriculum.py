"""A curriculum sampler that follows losses, an LR schedule of the script, early stopping that begins with None."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Sampler, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class ByLoss(Sampler):
    def __init__(self, n):
        self.n, self.scores, self.temperature = n, None, 1.0

    def __len__(self):
        return self.n

    def __iter__(self):
        if self.scores is None:
            yield from torch.randperm(self.n).tolist()
        else:
            yield from torch.multinomial(F.softmax(self.scores / self.temperature, 0), self.n, True).tolist()


class WarmupCosine:
    def __init__(self, opt, warmup, total):
        self.opt, self.warmup, self.total, self.t = opt, warmup, total, 0
        self.base = None

    def step(self):
        if self.base is None:
            self.base = [g["lr"] for g in self.opt.param_groups]
        self.t += 1
        f = self.t / self.warmup if self.t < self.warmup else 0.5 * (1 + math.cos(math.pi * self.t / self.total))
        for g, lr in zip(self.opt.param_groups, self.base):
            g["lr"] = lr * f

    def state_dict(self):
        return {k: v for k, v in self.__dict__.items() if k != "opt"}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.weights = patience, None, None, None

    def __call__(self, value, model):
        if self.best is None or value < self.best:
            self.best, self.bad, self.weights = value, None, copy.deepcopy(model.state_dict())
        else:
            self.bad = 1 if self.bad is None else self.bad + 1
        return self.bad is not None and self.bad >= self.patience

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


torch.manual_seed(6)
x = torch.randn(60, 6)
data = TensorDataset(x, (x.pow(2).sum(1) > 5).long(), torch.arange(60))
sampler = ByLoss(60)
loader = ResumableLoader(data, batch_size=6, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2))
net.losses = None
opt = torch.optim.AdamW(net.parameters(), lr=0.02)
sched, stop = WarmupCosine(opt, 5, 60), EarlyStopping(2)
ckpt = Checkpointer()
ckpt.track(net=net, opt=opt, sched=sched, stop=stop, loader=loader, epochs=(progress := {"stopped": False}))
step = ckpt.restore()
for _ in range(loader.epoch, 6):
    if progress["stopped"]:
        break
    sampler.scores = None if net.losses is None else net.losses.clone()
    for a, b, idx in loader:
        each = F.cross_entropy(net(a), b, reduction="none")
        opt.zero_grad()
        each.mean().backward()
        opt.step()
        sched.step()
        if net.losses is None:
            net.losses = torch.zeros(60)
        net.losses[idx] = each.detach()
        step += 1
        if step % 10 == 0:
            net.eval()
            with torch.no_grad():
                progress["stopped"] = stop(F.cross_entropy(net(x), data.tensors[1]).item(), net)
            net.train()
        ckpt.step(step)
torch.save([net.state_dict(), stop.weights, stop.best, net.losses, opt.param_groups[0]["lr"], step], "model.pt")
