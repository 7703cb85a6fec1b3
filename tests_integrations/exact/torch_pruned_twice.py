"""Weights are pruned twice: the second time depends on an attribute that the last forward pass has set."""

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(0)
loader = ResumableLoader(TensorDataset(torch.randn(32, 6), torch.randint(0, 2, (32,))), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
prune.identity(model[0], "weight")
prune.identity(model[3], "weight")
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ck = Checkpointer()
ck.track(model=model, opt=opt, loader=loader)
step = ck.restore()
for epoch in range(loader.epoch, 5):
    for x, y in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        step += 1
        ck.step(step)
    if epoch in (1, 3):
        prune.global_unstructured([(model[0], "weight"), (model[3], "weight")], prune.L1Unstructured, amount=0.2)
torch.save(model.state_dict(), "model.pt")
