"""Hooks at the start of an epoch: accumulation by epoch, noise by epoch, a body that is unfrozen, a new head."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Margin(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.margin = 0.1 * trainer.current_epoch


class Counted(Callback):
    def __init__(self):
        self.epochs = 0

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs += 1
        pl_module.scale.mul_(1.1)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2)), nn.Linear(12, 2)
        self.body.requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def on_train_epoch_start(self):
        self.noise = torch.tensor(0.05 * self.current_epoch)
        self.scale.mul_(0.9)
        if self.current_epoch == 1:
            self.body.requires_grad_(True)
        if self.current_epoch == 2:
            self.head.reset_parameters()
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x + self.noise * torch.randn_like(x)
        return nn.functional.cross_entropy(self.head(self.body(x)) * self.scale - self.margin, y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


L.seed_everything(5)
loader = ResumableLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 2, (40,))), batch_size=5, shuffle=True)
model, counted, resilient = Net(), Counted(), ResilientCallback()
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[GradientAccumulationScheduler({0: 1, 2: 2}), Margin(), counted, resilient],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save([model.state_dict(), counted.epochs, trainer.optimizers[0].state_dict(), trainer.global_step], "model.pt")
