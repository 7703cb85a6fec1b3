"""A learner with callbacks, as in fastai: the step is reported by a callback, the loop variables are attributes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Callback:
    order = 0

    def __getattr__(self, name):
        return getattr(self.learn, name)


class Recorder(Callback):
    def before_fit(self):
        self.losses, self.best = [], float("inf")

    def after_batch(self):
        self.losses.append(float(self.loss))

    def after_epoch(self):
        print(self.epoch, sum(self.losses[-5:]) / 5)


class Warm(Callback):
    def before_batch(self):
        for g in self.opt.param_groups:
            g["lr"] = 0.05 * min(1.0, (self.n_iter + 1) / 10)


class Save(Callback):
    order = 99

    def __init__(self, checkpointer):
        self.checkpointer = checkpointer

    def before_fit(self):
        self.checkpointer.track(model=self.model, opt=self.opt, dls=self.train_dl)
        self.learn.n_iter = self.checkpointer.restore()

    def after_batch(self):
        self.checkpointer.step(self.n_iter)


class Learner:
    def __init__(self, model, train_dl, valid_dl, cbs):
        self.model, self.train_dl, self.valid_dl = model, train_dl, valid_dl
        self.cbs = sorted(cbs, key=lambda c: c.order)
        for c in self.cbs:
            c.learn = self

    def __call__(self, name):
        for cb in self.cbs:
            f = getattr(type(cb), name, None)
            if f is not None:
                f(cb)

    def one_batch(self):
        self("before_batch")
        self.pred = self.model(self.xb)
        self.loss = nn.functional.mse_loss(self.pred, self.yb)
        if self.model.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.n_iter += 1
            self("after_batch")

    def all_batches(self, dl):
        for self.xb, self.yb in dl:
            self.one_batch()

    def fit(self, n, lr=0.05):
        self.opt, self.n_iter = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9), 0
        self("before_fit")
        for self.epoch in range(self.train_dl.epoch, n):
            self.model.train()
            self.all_batches(self.train_dl)
            self.model.eval()
            with torch.no_grad():
                for self.xb, self.yb in self.valid_dl:
                    self.pred = self.model(self.xb)
            self("after_epoch")


torch.manual_seed(0)
x = torch.randn(60, 4)
train, valid = TensorDataset(x[:45], x[:45].sum(1, keepdim=True)), TensorDataset(x[45:], x[45:].sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
learn = Learner(
    model,
    ResumableLoader(train, batch_size=5, shuffle=True),
    DataLoader(valid, batch_size=15),
    [Recorder(), Warm(), Save(Checkpointer())],
)
learn.fit(4)
torch.save(model.state_dict(), "model.pt")
