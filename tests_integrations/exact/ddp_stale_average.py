"""DDP: hidden state, a centre and a generator that each rank creates in its first step; no_sync; a plain counter."""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader


class Window:
    def __init__(self, size):
        self.size, self.values = size, []

    def add(self, value):
        self.values = [*self.values, value][-self.size :]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 2)
        self.hidden = self.window = self.noise = None

    def forward(self, x):
        if self.noise is None:
            self.noise = torch.Generator().manual_seed(11 + dist.get_rank())
            self.window = Window(3)
        h = self.cell(x, torch.zeros(len(x), 8) if self.hidden is None else self.hidden)
        self.hidden = h.detach()
        self.window.add(float(h.detach().mean()))
        h = h + 0.05 * torch.randn(h.shape, generator=self.noise)
        return self.out(h) * (1 + sum(self.window.values) / len(self.window.values))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
loader = ResumableLoader(data, batch_size=4, shuffle=True, drop_last=True)
model = DDP(Net())
opt = torch.optim.Adam(model.parameters(), lr=0.01)
opt._updates = 0
ckpt = ddp.checkpointer()
ckpt.track(model=model, opt=opt, loader=loader)
step = ckpt.restore()
for epoch in range(loader.epoch, 3):
    loader.sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader, loader.used):
        last = i % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            (F.cross_entropy(model(x), y) / 2).backward()
        if not last:
            continue
        opt.param_groups[0]["lr"] = 0.01 / (1 + 0.1 * opt._updates)
        opt.step()
        opt.zero_grad()
        opt._updates += 1
        step += 1
        ckpt.step(step)
rank = dist.get_rank()
torch.save([model.module.state_dict(), opt._updates], "model.pt") if rank == 0 else None
if rank == 1:
    Path("result.1.json").write_text(repr([model.module.hidden.tolist(), model.module.window.values]))
dist.destroy_process_group()
