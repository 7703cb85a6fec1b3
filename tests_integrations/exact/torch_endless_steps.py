"""Steps without epochs: endless batches, bfloat16, an average held by alias, an iterator of validation data."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


def endless(loader):
    while True:
        yield from loader


torch.manual_seed(0)
data = TensorDataset(torch.randn(44, 8), torch.randn(44, 1))
held_out = TensorDataset(torch.randn(20, 8), torch.randn(20, 1))
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
val_loader = ResumableLoader(held_out, batch_size=4, shuffle=True, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
average = copy.deepcopy(model.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

checkpointer = Checkpointer()
checkpointer.track(
    model=model, average=average, optimizer=optimizer, scheduler=scheduler, loader=loader, val_loader=val_loader
)
checkpointer.progress["loss"] = 0.0
step = checkpointer.restore()
progress = checkpointer.progress
batches, val_batches = endless(loader), endless(val_loader)
while step < 24:
    optimizer.zero_grad()
    for _ in range(2):
        inputs, targets = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(inputs).float(), targets) / 2
        loss.backward()
        progress["loss"] += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for name, value in model.state_dict().items():
        average[name].lerp_(value, 0.1)
    step += 1
    if step % 4 == 0:
        print(step, progress["loss"] / 4)
        progress["loss"] = 0.0
        model.eval()
        inputs, targets = next(val_batches)
        with torch.no_grad():
            scheduler.step(nn.functional.mse_loss(model(inputs), targets))
        model.train()
    checkpointer.step(step)

torch.save([model.state_dict(), average, optimizer.state_dict(), scheduler.state_dict(), progress["loss"]], "model.pt")
