"""DDP: gradients accumulated with `no_sync`, OneCycle, and a moving average of the weights."""

import contextlib

import torch
from torch import distributed, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader

distributed.init_process_group("gloo")
torch.manual_seed(distributed.get_rank())
data = TensorDataset(torch.arange(640.0).cos().view(64, 10), torch.arange(64) % 4)
loader = ResumableLoader(data, batch_size=4, shuffle=True)
net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
model = nn.parallel.DistributedDataParallel(net)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=12)

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, average=average, optimizer=optimizer, scheduler=scheduler, loader=loader)
step = checkpointer.restore()
for _ in range(loader.epoch, 3):
    for number, (inputs, labels) in enumerate(loader):
        last = number % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            (nn.functional.cross_entropy(model(inputs), labels) / 2).backward()
        if last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(net)
            step += 1
            checkpointer.step(step)

if distributed.get_rank() == 0:
    torch.save([net.state_dict(), average.state_dict(), optimizer.state_dict(), scheduler.state_dict()], "model.pt")
distributed.destroy_process_group()
