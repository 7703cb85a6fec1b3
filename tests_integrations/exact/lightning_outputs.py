"""Outputs in a list, a metric in the module, a callback that counts; a plateau of their mean."""

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Count(L.Callback):
    """Raises the dropout every three batches."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches += 1
        if self.batches % 3 == 0:
            pl_module.net[2].p = min(0.6, pl_module.net[2].p + 0.02)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.outputs, self.best = [], 10.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        self.acc.update(out, y)
        self.outputs.append(loss)
        return loss

    def on_train_epoch_end(self):
        mean = torch.stack(self.outputs).mean()
        self.log("train_mean", mean)
        self.log("train_acc", self.acc.compute())
        self.best = min(self.best, float(mean.detach()))
        self.outputs.clear()
        self.acc.reset()

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), 0.02)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.05)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "train_mean"}}


L.seed_everything(4)
x = torch.randn(48, 6)
ds = TensorDataset(x, (x[:, 0] > 0).long())
model, resilient = Lit(), ResilientCallback()
trainer = L.Trainer(
    max_epochs=5,
    gradient_clip_val=0.5,
    val_check_interval=2,
    limit_train_batches=5,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Count(), resilient],
)
trainer.fit(
    model, ResumableLoader(ds, batch_size=8, shuffle=True), DataLoader(ds, batch_size=24), ckpt_path=resilient.latest()
)
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
