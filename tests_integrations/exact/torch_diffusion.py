"""A denoiser with a trainer whose generator method repeats the loader, and averages every second step."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class EMA:
    def __init__(self, model, beta=0.9):
        self.model, self.beta, self.updates = copy.deepcopy(model), beta, 0

    def update(self, model):
        self.updates += 1
        beta = min(self.beta, (1 + self.updates) / (10 + self.updates))
        for a, b in zip(self.model.parameters(), model.parameters()):
            a.data.lerp_(b.data, 1 - beta)

    def state_dict(self):
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, sd):
        self.model.load_state_dict(sd["model"])
        self.updates = sd["updates"]


class Moons(Dataset):
    def __init__(self, n):
        self.t = torch.linspace(0, math.pi, n)

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        return torch.stack([self.t[i].cos(), self.t[i].sin()]) + 0.02 * torch.randn(2)


class Denoiser(nn.Module):
    def __init__(self, T):
        super().__init__()
        self.time = nn.Embedding(T, 8)
        self.net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], -1))


class DiffusionTrainer:
    def __init__(self, steps=36, batch=8, T=20):
        self.T, self.train_num_steps, self.step = T, steps, 0
        self.model = Denoiser(T)
        self.opt = torch.optim.Adam(self.model.parameters(), 2e-3)
        self.ema = EMA(self.model)
        self.dl = ResumableLoader(Moons(50), batch_size=batch, shuffle=True, drop_last=True)
        self.abar = torch.cumprod(1 - torch.linspace(1e-3, 0.2, T), 0)
        self.ckpt = Checkpointer()
        self.ckpt.track(model=self.model, opt=self.opt, ema=self.ema, dl=self.dl)
        self.step = self.ckpt.restore()

    def cycle(self):
        while True:
            for data in self.dl:
                yield data

    def train(self):
        dl = self.cycle()
        while self.step < self.train_num_steps:
            x = next(dl)
            t = torch.randint(0, self.T, (len(x),))
            noise = torch.randn_like(x)
            a = self.abar[t][:, None]
            loss = F.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            if self.step % 2 == 0:
                self.ema.update(self.model)
            self.ckpt.step(self.step)
        torch.save([self.model.state_dict(), self.ema.state_dict()], "model.pt")


torch.manual_seed(2)
DiffusionTrainer().train()
