"""Trains on a GPU with dropout, mixed precision, a fused optimizer and pinned batches, and saves in the background."""

import json
import os
from pathlib import Path

import torch
from torch import nn

from mizzen import Checkpointer
from mizzen.checkpoint import CheckpointSettings

STEPS = 15

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
torch.manual_seed(1)
device = torch.device("cuda")
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.2), nn.Linear(1024, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
scaler = torch.amp.GradScaler()
dataset = torch.randn(480, 256)
progress: dict[str, list[float]] = {"losses": []}
average = {name: tensor.clone() for name, tensor in model.state_dict().items()}

# Small pinned buffers, so that a save needs several pieces.
checkpointer = Checkpointer(background=True, settings=CheckpointSettings(pinned_bytes=1 << 20))
checkpointer.track(model=model, optimizer=optimizer, scaler=scaler, average=average, losses=progress)
step = checkpointer.restore()
model.train()
while step < STEPS:
    batch = dataset[torch.randperm(480)[:32]].pin_memory().to(device, non_blocking=True)
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(batch), batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            average[name].lerp_(tensor, 0.1)
    progress["losses"].append(loss.item())
    step += 1
    checkpointer.step(step)

checkpointer.wait()
torch.save([model.state_dict(), optimizer.state_dict(), scaler.state_dict(), average], "model.pt")
Path("result.json").write_text(json.dumps(progress))
