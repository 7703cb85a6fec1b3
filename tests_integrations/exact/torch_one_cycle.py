"""A split after the restore, a validation before the first step, OneCycle, and mixed precision on the CPU."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

EPOCHS = 3


@torch.no_grad()
def validate(model, loader):
    model.eval()
    loss = sum(nn.functional.cross_entropy(model(inputs), labels).item() for inputs, labels in loader)
    model.train()
    return loss


torch.manual_seed(8)
loader = ResumableLoader(TensorDataset(torch.randn(48, 8), torch.randint(0, 4, (48,))), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, epochs=EPOCHS, steps_per_epoch=len(loader))
scaler = torch.amp.GradScaler("cpu")
losses = {"val": []}

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=loader, losses=losses)
step = checkpointer.restore()
held_out = TensorDataset(torch.randn(30, 8), torch.randint(0, 4, (30,)))
val, _ = random_split(held_out, [20, 10])
val_loader = DataLoader(val, batch_size=10, shuffle=True)
samples = iter(val_loader)
validate(model, val_loader)
for _ in range(loader.epoch, EPOCHS):
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        step += 1
        checkpointer.step(step)
    losses["val"].append(validate(model, val_loader))

torch.save([model.state_dict(), optimizer.state_dict(), losses], "model.pt")
