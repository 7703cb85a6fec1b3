"""Tasks drawn from a generator, each with a loader and an iterator that is created again when it ends."""

import random

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(0)
choice = random.Random(0)
sizes = {"pos": 24, "ner": 36, "srl": 18}
loaders = {
    k: ResumableLoader(TensorDataset(torch.randn(n, 6), torch.randint(0, 3, (n,))), batch_size=6, shuffle=True, seed=i)
    for i, (k, n) in enumerate(sizes.items())
}
trunk = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1))
heads = nn.ModuleDict({k: nn.Linear(12, 3) for k in sizes})
opt = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=0.01)
ck = Checkpointer()
ck.track(choice=choice, trunk=trunk, heads=heads, opt=opt, **{f"loader_{k}": v for k, v in loaders.items()})
step = ck.restore()
iters = {k: iter(v) for k, v in loaders.items()}
while step < 40:
    task = choice.choices(list(sizes), weights=list(sizes.values()))[0]
    try:
        x, y = next(iters[task])
    except StopIteration:
        iters[task] = iter(loaders[task])
        x, y = next(iters[task])
    opt.zero_grad()
    nn.functional.cross_entropy(heads[task](trunk(x)), y).backward()
    opt.step()
    step += 1
    ck.step(step)
torch.save([trunk.state_dict(), heads.state_dict(), opt.state_dict()], "model.pt")
