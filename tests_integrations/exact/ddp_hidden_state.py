"""Each rank keeps a hidden state between batches."""

import torch
from torch import distributed, nn
from torch.utils import data

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 8), nn.Linear(8, 2)
        self.h, self.calls = None, 0

    def forward(self, x):
        self.calls += 1
        h = torch.zeros(len(x), 8) if self.h is None else self.h
        h = self.cell(x, h)
        self.h = h.detach() + 0.01 * torch.randn(8)
        return self.out(h) / (1 + 0.1 * (self.calls % 3))


distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
dataset = data.TensorDataset(torch.arange(384.0).sin().view(64, 6), torch.arange(64) % 2)
loader = ResumableLoader(dataset, batch_size=8, shuffle=True)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step = checkpointer.restore()
for epoch in range(loader.epoch, 4):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)
torch.save([model.module.state_dict(), model.module.h], "model.pt" if distributed.get_rank() == 0 else "other.pt")
distributed.barrier()
distributed.destroy_process_group()
