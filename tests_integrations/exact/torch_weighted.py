"""Rare classes are drawn more often by a weighted sampler; the dataset mixes in another sample."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Mixed(Dataset):
    def __init__(self):
        self.inputs, self.labels = torch.randn(60, 8), (torch.rand(60) < 0.2).long()

    def __len__(self):
        return 60

    def __getitem__(self, index):
        share = random.betavariate(2, 2)
        return share * self.inputs[index] + (1 - share) * self.inputs[random.randrange(60)], self.labels[index]


random.seed(0)
torch.manual_seed(0)
data = Mixed()
weights = torch.where(data.labels == 1, 4.0, 1.0)
loader = ResumableLoader(DataLoader(data, batch_size=6, sampler=WeightedRandomSampler(weights, 60)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
step = checkpointer.restore()
for _ in range(loader.epoch, 4):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        checkpointer.step(step)

torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], "model.pt")
