"""DDP: each rank draws its own noise in dataset and collator, and its own dropout."""

import torch
from torch import distributed, nn
from torch.utils.data import Dataset, default_collate

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader


class Noisy(Dataset):
    def __init__(self):
        self.inputs = torch.arange(480.0).sin().view(48, 10)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(10), index % 3


def collate(samples):
    inputs, labels = default_collate(samples)
    return inputs * (torch.rand(inputs.shape) > 0.1), labels


distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(rank)
loader = ResumableLoader(Noisy(), batch_size=4, shuffle=True, collate_fn=collate, num_workers=0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.2), nn.Linear(16, 3)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step = checkpointer.restore()
for epoch in range(loader.epoch, 3):
    loader.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)

if rank == 0:
    torch.save([model.module.state_dict(), optimizer.state_dict()], "model.pt")
distributed.destroy_process_group()
