"""An ordinary shuffled loader, saved after whole epochs; keeps the best model and stops early."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

from mizzen import Checkpointer


class Noisy(Dataset):
    def __init__(self):
        self.inputs = torch.randn(60, 6)

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(6), self.inputs[index].abs().sum()


torch.manual_seed(2)
train, val = random_split(Noisy(), [44, 16])
train_loader = DataLoader(train, batch_size=11, shuffle=True, num_workers=1)
val_loader = DataLoader(val, batch_size=16)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
best = {"loss": float("inf"), "model": copy.deepcopy(model.state_dict()), "waited": 0}

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, best=best)
start = checkpointer.restore()
for epoch in range(start, 12):
    if best["waited"] >= 4:
        break
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.mse_loss(model(x).squeeze(1), y).item() for x, y in val_loader)
    if loss < best["loss"]:
        best.update(loss=loss, model=copy.deepcopy(model.state_dict()), waited=0)
    else:
        best["waited"] += 1
    checkpointer.step(epoch + 1)

torch.save([model.state_dict(), best], "model.pt")
