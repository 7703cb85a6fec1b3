"""DDP: workers on each rank make noisy batches; a scheduler for each epoch."""

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import Dataset

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader


class Noisy(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((6,), index / 32) + torch.from_numpy(np.random.randn(6)).float() * 0.1, index % 2


distributed.init_process_group("gloo")
torch.manual_seed(17 + distributed.get_rank())
loader = ResumableLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
step = checkpointer.restore()
for _ in range(loader.epoch, 3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)
    scheduler.step()

if distributed.get_rank() == 0:
    torch.save([model.module.state_dict(), optimizer.state_dict(), scheduler.state_dict()], "model.pt")
distributed.destroy_process_group()
