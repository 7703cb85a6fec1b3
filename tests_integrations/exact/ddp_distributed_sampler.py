"""DDP: torch's own DistributedSampler in an ordinary loader, which is wrapped; the sampler is told the epoch."""

import random

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader


class Flipped(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        row = torch.arange(8.0) * (index % 7 - 3)
        return (row.flip(0) if random.random() < 0.5 else row) / 8, torch.tensor(float(index % 7))


distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
random.seed(rank)
data = Flipped()
sampler = DistributedSampler(data, shuffle=True, seed=1)
loader = ResumableLoader(DataLoader(data, batch_size=4, sampler=sampler, num_workers=1))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step = checkpointer.restore()
for epoch in range(loader.epoch, 4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), targets).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)

if rank == 0:
    torch.save([model.module.state_dict(), optimizer.state_dict()], "model.pt")
distributed.destroy_process_group()
