"""A module, an optimizer and a callback with private state: a queue of negatives, a temperature, a patience."""

from collections import deque

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Noisy(torch.optim.SGD):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self._sigma, self._gen = 0.1, torch.Generator().manual_seed(7)

    def step(self, closure=None):
        out = super().step(closure)
        for g in self.param_groups:
            for p in g["params"]:
                p.data.add_(self._sigma * torch.randn(p.shape, generator=self._gen))
        self._sigma *= 0.95
        return out


class Patience(L.Callback):
    def __init__(self):
        self._best, self._bad = float("inf"), 0

    def on_train_batch_end(self, trainer, pl, outputs, batch, batch_idx):
        loss = float(outputs["loss"])
        if loss < self._best:
            self._best, self._bad = loss, 0
        else:
            self._bad += 1
        if self._bad >= 4:
            for g in trainer.optimizers[0].param_groups:
                g["lr"] *= 0.5
            self._bad = 0


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 4))
        self._queue, self._temp, self._center = deque(maxlen=5), 1.0, torch.zeros(4)

    def training_step(self, batch, i):
        z = self.f(batch[0])
        self._center.data.mul_(0.9).add_(0.1 * z.detach().mean(0))
        neg = torch.stack(list(self._queue)) if self._queue else torch.zeros(1, 4)
        loss = torch.logsumexp((z - self._center) @ neg.T / self._temp, 1).mean() + z.pow(2).mean()
        self._queue.append(z.detach()[0].clone())
        self._temp = max(0.2, self._temp * 0.97)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return Noisy(self.parameters(), lr=0.1, momentum=0.5)


L.seed_everything(1)
net, res, pat = Net(), ResilientCallback(), Patience()
tr = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[pat, res],
)
tr.fit(net, ResumableLoader(TensorDataset(torch.randn(40, 6)), batch_size=5, shuffle=True), ckpt_path=res.latest())
torch.save(
    [net.state_dict(), list(net._queue), net._temp, net._center, pat._best, pat._bad, tr.optimizers[0]._sigma],
    "model.pt",
)
