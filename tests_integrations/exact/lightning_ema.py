"""An average of the weights in a callback of its own, used in validations within the epoch; accumulation."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Toy(Dataset):
    def __init__(self, n, train):
        g = torch.Generator().manual_seed(n)
        self.x, self.train = torch.randn(n, 8, generator=g), train

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return (x + 0.05 * torch.randn(8) if self.train else x), x.sum().sign().clamp(0).long()


class EMA(Callback):
    def __init__(self, decay=0.95):
        self.decay, self.shadow = decay, None

    def on_fit_start(self, trainer, pl_module):
        if self.shadow is None:
            self.shadow = copy.deepcopy(pl_module.state_dict())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for k, v in pl_module.state_dict().items():
            if v.is_floating_point():
                self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)

    def on_validation_epoch_start(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        self.backup = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.shadow)

    def on_validation_epoch_end(self, trainer, pl_module):
        if trainer.sanity_checking:
            return
        pl_module.load_state_dict(self.backup)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


class Net(L.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        opt = torch.optim.SGD(
            [{"params": self.body.parameters(), "lr": 0.01}, {"params": self.head.parameters()}],
            lr=self.hparams.lr,
            momentum=0.9,
        )
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 6))
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(11, workers=True)
    model, ema = Net(), EMA()
    resilient = ResilientCallback()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        callbacks=[ema, resilient],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        ResumableLoader(Toy(48, True), batch_size=6, shuffle=True),
        DataLoader(Toy(12, False), batch_size=6),
        ckpt_path=resilient.latest(),
    )
    torch.save([model.state_dict(), list(ema.shadow.values()), trainer.optimizers[0].state_dict()], "model.pt")
