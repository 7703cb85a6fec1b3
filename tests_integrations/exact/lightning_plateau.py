"""Validations within epochs; a plateau schedule that is stepped by epoch."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


lightning.seed_everything(2)
train = TensorDataset(torch.randn(80, 8), torch.randint(0, 3, (80,)))
val = TensorDataset(torch.randn(20, 8), torch.randint(0, 3, (20,)))
model = Classifier()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=4, val_check_interval=4, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[resilient],
)  # fmt: skip
trainer.fit(
    model, ResumableLoader(train, batch_size=8, shuffle=True), DataLoader(val, batch_size=10),
    ckpt_path=resilient.latest(),
)  # fmt: skip
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
