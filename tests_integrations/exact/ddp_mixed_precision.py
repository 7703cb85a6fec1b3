"""DDP: bfloat16 on the CPU, clipped gradients, and a sampler that is used alone, with its count of samples as step."""

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableSampler

distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
data = TensorDataset(torch.arange(480.0).sin().view(48, 10), torch.arange(48) % 3)
sampler = ResumableSampler(data, seed=5)
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 24), nn.Dropout(0.2), nn.Linear(24, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, sampler=sampler)
checkpointer.restore()
for epoch in range(sampler.epoch, 3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        checkpointer.step(sampler.advance(len(inputs)))

if distributed.get_rank() == 0:
    torch.save([model.module.state_dict(), optimizer.state_dict()], "model.pt")
distributed.destroy_process_group()
