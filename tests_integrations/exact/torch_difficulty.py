"""A dataset whose noise grows after each epoch, in an attribute."""

import torch
from torch import nn
from torch.utils.data import Dataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Toy(Dataset):
    def __init__(self):
        self.x = torch.randn(40, 4)
        self.difficulty = 0.1

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return self.x[i] + self.difficulty * torch.randn(4), int(self.x[i].sum() > 0)


torch.manual_seed(2)
data = Toy()
loader = ResumableLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.Adam(model.parameters(), 1e-2)
ck = Checkpointer()
ck.track(model=model, opt=opt, loader=loader)
step = ck.restore()
for _ in range(loader.epoch, 5):
    for x, y in loader:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        step += 1
        ck.step(step)
    data.difficulty += 0.1
torch.save(model.state_dict(), "model.pt")
