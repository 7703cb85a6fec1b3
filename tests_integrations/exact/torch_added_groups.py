"""Layers join the optimizer one by one, with rates of their own, while the training runs."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(3)
layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)])
model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Dropout(0.1), layers[2])
loader = ResumableLoader(TensorDataset(torch.randn(32, 6), torch.randint(0, 2, (32,))), batch_size=8, shuffle=True)
for p in model.parameters():
    p.requires_grad = False
for p in layers[2].parameters():
    p.requires_grad = True
optimizer = torch.optim.Adam(layers[2].parameters(), lr=1e-2)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step = checkpointer.restore()
for epoch in range(loader.epoch, 5):
    if epoch in (1, 3):
        layer = layers[1] if epoch == 1 else layers[0]
        for p in layer.parameters():
            p.requires_grad = True
        optimizer.add_param_group({"params": layer.parameters(), "lr": 1e-3})
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)
torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")
