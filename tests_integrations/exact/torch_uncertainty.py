"""Losses weighted by learned uncertainties, which are parameters beside the model; a learned temperature, a scaler."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)), torch.randn(40))
loader = ResumableLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
log_vars = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [log_vars], "lr": 0.05}], lr=0.01)
ckpt = Checkpointer()
ckpt.track(model=model, optimizer=optimizer, loader=loader, weights={"log_vars": log_vars})
step = ckpt.restore()
for _ in range(loader.epoch, 4):
    for x, label, value in loader:
        out = model(x)
        losses = torch.stack([nn.functional.cross_entropy(out[:, :3], label), nn.functional.mse_loss(out[:, 3], value)])
        loss = (torch.exp(-log_vars) * losses + log_vars).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        ckpt.step(step)
torch.save([model.state_dict(), log_vars], "model.pt")
