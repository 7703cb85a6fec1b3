"""Trains with DistributedDataParallel on gloo. Each of the two ranks has its own data shard and random generators."""

import json
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils import data

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader

EPOCHS = 3

distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
dataset = data.TensorDataset(torch.arange(3840.0).sin().view(192, 20), torch.arange(192) % 3)
loader = ResumableLoader(dataset, batch_size=16, shuffle=True)
net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * 6)
history: dict[str, list[float]] = {"losses": []}

checkpointer = ddp.checkpointer()
checkpointer.track(
    model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, history=history, own=["history"]
)
step = checkpointer.restore()
for epoch in range(loader.epoch, EPOCHS):
    loader.sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        history["losses"].append(loss.item())
        step += 1
        checkpointer.step(step)

if distributed.get_rank() == 0:
    torch.save([net.state_dict(), optimizer.state_dict()], "model.pt")
    Path("result.json").write_text(json.dumps(history))
else:
    Path("result.1.json").write_text(json.dumps(history))
distributed.destroy_process_group()
