"""DDP: a validation on all ranks after each epoch, whose mean steers a plateau schedule and stops the training."""

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(100 + rank)
inputs = torch.arange(800.0).sin().view(80, 10)
train = TensorDataset(inputs[:64], inputs[:64].sum(1))
val = TensorDataset(inputs[64:], inputs[64:].sum(1))
loader = ResumableLoader(train, batch_size=8, shuffle=True)
val_loader = DataLoader(val, batch_size=4, sampler=DistributedSampler(val, shuffle=False))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(10, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
progress = {"best": float("inf"), "waited": 0}

checkpointer = ddp.checkpointer()
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, progress=progress)
step = checkpointer.restore()
while loader.epoch < 5 and progress["waited"] < 3:
    model.train()
    for batch, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch).squeeze(1), targets).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)
    model.eval()
    with torch.no_grad():
        loss = sum(nn.functional.mse_loss(model(batch).squeeze(1), targets) for batch, targets in val_loader)
    distributed.all_reduce(loss)
    scheduler.step(loss.item())
    better = loss.item() < progress["best"]
    progress["best"], progress["waited"] = (loss.item(), 0) if better else (progress["best"], progress["waited"] + 1)

if rank == 0:
    torch.save([model.module.state_dict(), optimizer.state_dict(), scheduler.state_dict(), progress], "model.pt")
distributed.destroy_process_group()
