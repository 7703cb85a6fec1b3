"""The resumable sampler in an ordinary loader with workers; a validation after each epoch; a plateau schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableSampler


class Noisy(Dataset):
    def __init__(self):
        self.inputs = torch.randn(72, 10)

    def __len__(self):
        return 72

    def __getitem__(self, index):
        return self.inputs[index] + 0.05 * torch.randn(10), self.inputs[index].sum()


torch.manual_seed(11)
train, val = random_split(Noisy(), [56, 16])
sampler = ResumableSampler(train)
loader = DataLoader(train, batch_size=8, sampler=sampler, num_workers=2)
val_loader = DataLoader(val, batch_size=8)
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
checkpointer.restore()
for epoch in range(sampler.epoch, 4):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), targets).backward()
        optimizer.step()
        checkpointer.step(sampler.advance(len(inputs)))
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(inputs).squeeze(1), targets) for inputs, targets in val_loader]
    scheduler.step(torch.stack(losses).mean().item())

torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], "model.pt")
