"""Trains a convolutional network with mixed precision, the one-cycle schedule and a moving average of the weights."""

import json
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import data

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

EPOCHS = 3

torch.manual_seed(1)
dataset = data.TensorDataset(torch.randn(96, 1, 8, 8), torch.randint(0, 3, (96,)))
loader = ResumableLoader(dataset, batch_size=16, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 3)
)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * 6)
scaler = torch.amp.GradScaler("cpu")
history: dict[str, list[float]] = {"losses": []}

checkpointer = Checkpointer()
checkpointer.track(
    model=model,
    average=average,
    optimizer=optimizer,
    scheduler=scheduler,
    scaler=scaler,
    loader=loader,
    history=history,
)
step = checkpointer.restore()
for _ in range(loader.epoch, EPOCHS):
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        history["losses"].append(loss.item())
        step += 1
        checkpointer.step(step)

torch.save([model.state_dict(), average.state_dict(), optimizer.state_dict()], "model.pt")
Path("result.json").write_text(json.dumps(history))
