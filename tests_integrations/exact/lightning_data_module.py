"""A data module with running means, noise of its own, and another dataset, which caches rows, in each epoch."""

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Rows(Dataset):
    def __init__(self, seed, size):
        g = torch.Generator().manual_seed(seed)
        self.rows, self.cache = torch.randn(size, 6, generator=g) + 2, {}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = self.rows[i].clone()
        return self.cache[i], int(self.rows[i, 0] > 2)


class Data(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.mean, self.seen, self.noise = torch.zeros(6), 0, 0.2
        self.rng = np.random.default_rng(3)

    def setup(self, stage):
        self.val = Rows(99, 16)

    def train_dataloader(self):
        self.train = Rows(self.trainer.current_epoch, 32)
        return ResumableLoader(self.train, batch_size=6, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training:
            self.seen += 1
            self.mean = self.mean + (x.mean(0) - self.mean) / self.seen
            self.noise *= 0.97
            x = x + self.noise * torch.from_numpy(self.rng.normal(size=tuple(x.shape))).float()
        return x - self.mean, y


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=0.02)
        sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.02)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "monitor": "val_loss"}}


L.seed_everything(1)
model, data, resilient = Net(), Data(), ResilientCallback()
trainer = L.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, reload_dataloaders_every_n_epochs=1, callbacks=[resilient],
)  # fmt: skip
trainer.fit(model, datamodule=data, ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict(), data.mean, data.seen], "model.pt")
