"""A plateau schedule and early stopping that follow the mean of the training loss over an epoch."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Regressor(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 1))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


lightning.seed_everything(8)
model = Regressor()
resilient = ResilientCallback()
stop = EarlyStopping("train_loss", patience=3, check_on_train_epoch_end=True)
trainer = lightning.Trainer(
    max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[stop, resilient],
)  # fmt: skip
data = TensorDataset(torch.randn(40, 6), torch.randn(40))
trainer.fit(model, ResumableLoader(data, batch_size=8, shuffle=True), ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict(), trainer.current_epoch], "model.pt")
