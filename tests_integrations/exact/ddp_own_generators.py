"""DDP: the dataset of each rank owns a generator, and each rank keeps a cache of losses of its own."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import Dataset

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader


class Jittered(Dataset):
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.from_numpy(self.rng.normal(index / 32, 0.1, 6)).float(), torch.tensor(index / 32)


distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(rank)
loader = ResumableLoader(Jittered(rank), batch_size=4, shuffle=True)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
cache = {"losses": []}

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader, cache=cache, own=["cache", "loader"])
step = checkpointer.restore()
for _ in range(loader.epoch, 3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
        loss.backward()
        optimizer.step()
        cache["losses"].append(loss.item())
        step += 1
        checkpointer.step(step)

if rank == 0:
    torch.save([model.module.state_dict(), optimizer.state_dict()], "model.pt")
Path(f"result.{rank}.json" if rank else "result.json").write_text(json.dumps(cache))
distributed.destroy_process_group()
