"""Weights of samples from their losses; a sampler for each epoch; saved between epochs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import mizzen

torch.manual_seed(5)
xs, ys = torch.randn(40, 4), torch.randn(40, 1)
indices = torch.arange(40)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.RMSprop(model.parameters(), lr=0.01)
state = {"difficulty": torch.ones(40), "epoch": 0}
ck = mizzen.Checkpointer()
ck.track(model=model, opt=opt, state=state)
ck.restore()
for epoch in range(state["epoch"], 6):
    sampler = WeightedRandomSampler(state["difficulty"], 40)
    for x, y, i in DataLoader(TensorDataset(xs, ys, indices), batch_size=8, sampler=sampler):
        loss = ((model(x) - y) ** 2).squeeze(1)
        opt.zero_grad()
        loss.mean().backward()
        opt.step()
        state["difficulty"][i] = 0.5 * state["difficulty"][i] + 0.5 * loss.detach()
    state["epoch"] = epoch + 1
    ck.step(epoch + 1)
torch.save([model.state_dict(), state], "model.pt")
