"""Early stopping and Lightning's own best checkpoint; the data in a module that splits it."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Data(lightning.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, generator=generator))
        self.train, self.val = random_split(data, [48, 16], generator=generator)

    def train_dataloader(self):
        return ResumableLoader(self.train, batch_size=8, shuffle=True, num_workers=1)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=8)


class Regressor(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1])

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


lightning.seed_everything(5)
model = Regressor()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=12, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[EarlyStopping("val_loss", patience=2), resilient],
)  # fmt: skip
trainer.fit(model, Data(), ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict(), trainer.current_epoch], "model.pt")
