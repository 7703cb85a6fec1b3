"""Lightning: a callback that keeps the best weights and its patience in attributes that begin with None."""

import copy
from dataclasses import dataclass

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


@dataclass
class Record:
    loss: float
    epoch: int


class Rollback(L.Callback):
    def __init__(self):
        self.best = None
        self.best_module = None
        self.waited = None
        self.trace = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = float(outputs["loss"])
        self.trace = loss if self.trace is None else 0.8 * self.trace + 0.2 * loss
        if self.best is None or loss < self.best.loss:
            self.best = Record(loss, trainer.current_epoch)
            self.best_module = copy.deepcopy(module.net)
            self.waited = 0
        else:
            self.waited += 1
        if self.waited >= 4:
            with torch.no_grad():
                for p, q in zip(module.net.parameters(), self.best_module.parameters()):
                    p.lerp_(q, 0.5)
            self.waited = None
            self.best = None


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.prototypes = None
        self._last_grad_norm = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.net[:3](x)
        if self.prototypes is None:
            self.prototypes = h.detach().mean(0)
        loss = nn.functional.cross_entropy(self.net[3](h), y) + 0.01 * (h - self.prototypes).pow(2).mean()
        self.prototypes = 0.9 * self.prototypes + 0.1 * h.detach().mean(0)
        return loss * (1.0 if self._last_grad_norm is None else 1.0 / (1.0 + self._last_grad_norm))

    def on_before_optimizer_step(self, optimizer):
        self._last_grad_norm = float(sum(p.grad.norm() for p in self.parameters() if p.grad is not None))

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5)}


L.seed_everything(5)
x = torch.randn(48, 5)
loader = ResumableLoader(DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True))
model, rollback, resilient = Lit(), Rollback(), ResilientCallback()
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, accumulate_grad_batches=2, callbacks=[rollback, resilient],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save(
    [model.state_dict(), model.prototypes, rollback.trace, rollback.waited, rollback.best_module.state_dict()],
    "model.pt",
)
