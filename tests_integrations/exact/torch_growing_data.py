"""A curriculum: each stage has more samples, so each epoch creates a loader of another length."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(6)
data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
order = data.tensors[0].norm(dim=1).argsort().tolist()
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.01)


class Curriculum(torch.utils.data.Dataset):
    def __init__(self, data, order):
        self.data, self.order, self.n = data, order, 16

    def set_epoch(self, epoch):
        self.n = min(60, 16 + 12 * epoch)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.data[self.order[i]]


dataset = Curriculum(data, order)
loader = ResumableLoader(dataset, batch_size=8, shuffle=True)
ckpt = Checkpointer()
ckpt.track(model=model, opt=opt, loader=loader)
step = ckpt.restore()
for epoch in range(loader.epoch, 5):
    dataset.set_epoch(epoch)
    for x, y in loader:
        opt.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()
        step += 1
        ckpt.step(step)
torch.save([model.state_dict(), opt.state_dict(), step], "model.pt")
