"""Born-again training: None at first, then a teacher, statistics, a phase and a loss that the script creates on the way."""

import copy
import enum
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Phase(enum.Enum):
    ALONE, TAUGHT = "alone", "taught"


@dataclass
class Best:
    loss: float
    step: int
    weights: dict = field(repr=False, default=None)


class RunningStats:
    def __init__(self, like):
        self.mean, self.n = torch.zeros_like(like), 0

    def update(self, x):
        self.n += 1
        self.mean += (x - self.mean) / self.n


class Rows(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(48, 6, generator=g), torch.randint(0, 3, (48,), generator=g)
        self.augment, self.rng = None, None

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.augment is not None:
            x = x + self.augment["noise"] * torch.from_numpy(self.rng.normal(size=6)).float()
        return x, self.y[i]


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)
        self.act = nn.Identity()
        self.stats = self.best = self.soft = self.centre = None
        self.phase = Phase.ALONE
        self.teachers = []

    def forward(self, x):
        h = self.act(self.body(x))
        if self.stats is None:
            self.stats = RunningStats(h[0].detach())
        self.stats.update(h.detach().mean(0))
        return self.head(h - 0.1 * self.stats.mean)

    def loss(self, x, y):
        out = self(x)
        loss = F.cross_entropy(out, y)
        if self.phase is Phase.TAUGHT:
            with torch.no_grad():
                soft = torch.stack([t(x) for t in self.teachers]).mean(0)
                self.centre = soft.mean(0) if self.centre is None else 0.9 * self.centre + 0.1 * soft.mean(0)
            loss = loss + self.soft(out, soft - self.centre)
        return loss


torch.manual_seed(3)
data = Rows()
loader = ResumableLoader(data, batch_size=8, shuffle=True)
net = Student()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
ckpt = Checkpointer()
ckpt.track(net=net, opt=opt, loader=loader)
step = ckpt.restore()
for _ in range(loader.epoch, 5):
    for x, y in loader:
        loss = net.loss(x, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if net.best is None or loss.item() < net.best.loss:
            net.best = Best(loss.item(), step, copy.deepcopy(net.state_dict()))
        if step == 8:
            data.augment, data.rng = {"noise": 0.1}, np.random.default_rng(7)
        if step in (10, 20):
            teacher = copy.deepcopy(net).eval()
            teacher.load_state_dict(net.best.weights)
            teacher.stats = copy.deepcopy(net.stats)
            net.teachers.append(teacher.requires_grad_(False))
            net.phase, net.soft = Phase.TAUGHT, F.l1_loss if step == 10 else F.mse_loss
            net.act = nn.LeakyReLU(0.2)
        ckpt.step(step)
torch.save(
    [net.state_dict(), net.best.weights, net.best.loss, net.centre, net.stats.mean, len(net.teachers)], "model.pt"
)
