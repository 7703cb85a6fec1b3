"""Lightning's own callback that averages the weights; the data and their size change with the epoch."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Data(L.LightningDataModule):
    def setup(self, stage):
        g = torch.Generator().manual_seed(3)
        self.data = TensorDataset(torch.randn(60, 6, generator=g), torch.randint(0, 2, (60,), generator=g))

    def train_dataloader(self):
        n = 20 + 10 * self.trainer.current_epoch
        return ResumableLoader(Subset(self.data, range(n)), batch_size=5, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Subset(self.data, range(50, 60)), batch_size=5)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


L.seed_everything(1)
model, resilient = Net(), ResilientCallback()
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1,
    callbacks=[EMAWeightAveraging(decay=0.9, update_starting_at_step=6), resilient],
)  # fmt: skip
trainer.fit(model, datamodule=Data(), ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
