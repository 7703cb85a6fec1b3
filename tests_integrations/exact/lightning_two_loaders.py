"""Labelled and unlabelled batches from two loaders of different lengths."""

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Mixed(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        (x, y), (u,) = batch["labelled"], batch["unlabelled"]
        loss = nn.functional.mse_loss(self.f(x), y) + 0.1 * (self.f(u) - self.f(u)).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.f(batch[0]), batch[1]))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), 0.01)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]


L.seed_everything(3)
xs = torch.randn(80, 4)
loaders = {
    "labelled": ResumableLoader(
        TensorDataset(xs[:24], xs[:24].sum(1, keepdim=True)), batch_size=4, shuffle=True, seed=1
    ),
    "unlabelled": ResumableLoader(TensorDataset(xs[24:64]), batch_size=4, shuffle=True, seed=2),
}
model = Mixed()
resilient = ResilientCallback()
trainer = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[resilient],
    check_val_every_n_epoch=2,
)
val = DataLoader(TensorDataset(xs[64:], xs[64:].sum(1, keepdim=True)), batch_size=8)
trainer.fit(model, CombinedLoader(loaders, "max_size_cycle"), val, ckpt_path=resilient.latest())
torch.save(model.state_dict(), "model.pt")
