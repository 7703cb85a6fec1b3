"""Triplets from a batch sampler that owns a generator; the mean loss is divided by a number that is checked."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import mizzen
from mizzen.integrations.torch import ResumableLoader


class PKSampler(Sampler):
    def __init__(self, labels, p, k, seed=0):
        self.p, self.k, self.rng = p, k, random.Random(seed)
        self.by = {}
        for i, l in enumerate(labels):
            self.by.setdefault(l, []).append(i)

    def __len__(self):
        return len(self.by) // self.p

    def __iter__(self):
        classes = list(self.by)
        self.rng.shuffle(classes)
        for i in range(len(self)):
            yield [j for c in classes[i * self.p : (i + 1) * self.p] for j in self.rng.sample(self.by[c], self.k)]


torch.manual_seed(4)
y = torch.arange(8).repeat(6)
x = torch.randn(48, 5) + y[:, None] * 0.3
loader = ResumableLoader(DataLoader(TensorDataset(x, y), batch_sampler=PKSampler(y.tolist(), 2, 3)))
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
opt = torch.optim.Adam(net.parameters(), 5e-3)
triplet = nn.TripletMarginLoss(margin=0.3)
ck = mizzen.Checkpointer()
ck.track(net=net, opt=opt, loader=loader)
step = ck.restore()
EPOCHS = 8
for epoch in range(loader.epoch, EPOCHS):
    epoch_loss, num = 0.0, 0
    for xb, yb in loader:
        e = net(xb)
        d = torch.cdist(e, e)
        pos = (d * (yb[:, None] == yb)).argmax(1)
        neg = (d + 1e6 * (yb[:, None] == yb)).argmin(1)
        loss = triplet(e, e[pos], e[neg])
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch_loss += loss.item() * len(xb)
        num += len(xb)
        step += 1
        ck.step(step)
    if num:
        print(epoch, epoch_loss / num)
torch.save([net.state_dict(), opt.state_dict()], "model.pt")
