"""DDP: mixup from numpy's generator of each rank, a warm-up, the last epoch without mixup."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations import ddp
from mizzen.integrations.torch import ResumableLoader


def mixup(x, y, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(x.size(0))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    np.random.seed(7 + rank)
    torch.manual_seed(7 + rank)
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(52, 6, generator=g), torch.randint(0, 3, (52,), generator=g))
    loader = ResumableLoader(data, batch_size=4, shuffle=True, drop_last=True)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    model = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1 * world, momentum=0.9, nesterov=True)
    warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 15)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [warmup, cosine], [5])
    ckpt = ddp.checkpointer()
    ckpt.track(model=model, opt=opt, sched=sched, loader=loader)
    step = ckpt.restore()
    epochs, loss = 3, torch.zeros(())
    for epoch in range(loader.epoch, epochs):
        model.train()
        for x, y in loader:
            if epoch < epochs - 1:
                x, a, b, lam = mixup(x, y)
                out = model(x)
                loss = lam * nn.functional.cross_entropy(out, a) + (1 - lam) * nn.functional.cross_entropy(out, b)
            else:
                loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            ckpt.step(step)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world:.4f}")
    if int(os.environ["RANK"]) == 0:
        torch.save([model.module.state_dict(), opt.state_dict(), sched.state_dict()], "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
