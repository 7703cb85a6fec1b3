"""Weights are pruned after the third epoch, which gives the model other entries, and trained further."""

import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(0)
loader = ResumableLoader(TensorDataset(torch.randn(32, 6), torch.randint(0, 2, (32,))), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ckpt = Checkpointer()
ckpt.track(model=model, optimizer=optimizer, loader=loader)


def shrink():
    for layer in (model[0], model[3]):
        prune.l1_unstructured(layer, "weight", amount=0.3)


ckpt.progress["pruned"] = False
ckpt.restore(parts=["progress"])
if ckpt.progress["pruned"]:
    shrink()
step = ckpt.restore()
for epoch in range(loader.epoch, 6):
    if epoch >= 3 and not ckpt.progress["pruned"]:
        shrink()
        ckpt.progress["pruned"] = True
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        ckpt.step(step)
torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")
