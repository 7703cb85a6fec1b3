"""Trains with Lightning: validations within epochs, a plateau schedule, early stopping and a best checkpoint."""

import json
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils import data

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Regressor(lightning.LightningModule):
    """A small network with dropout, which counts its epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
        self.register_buffer("epochs", torch.zeros(()))

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]).squeeze(1), batch[1])

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]).squeeze(1), batch[1]))

    def on_train_epoch_end(self) -> None:
        self.epochs += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


lightning.seed_everything(3)
inputs = torch.randn(40, 6)
train, val = data.random_split(data.TensorDataset(inputs, inputs.sum(1) + 3 * torch.randn(40)), [24, 16])
best = ModelCheckpoint("best", monitor="val_loss")
stop = EarlyStopping("val_loss", patience=12)
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=7,
    val_check_interval=0.5,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    accelerator="cpu",
    callbacks=[best, stop, resilient],
)
model = Regressor()
loaders = ResumableLoader(train, batch_size=6, shuffle=True), data.DataLoader(val, batch_size=8, shuffle=True)
trainer.fit(model, *loaders, ckpt_path=resilient.latest())
found = torch.load(best.best_model_path, weights_only=True)["state_dict"]
torch.save([model.state_dict(), found], "model.pt")
ended = [float(best.best_model_score), stop.wait_count, trainer.global_step, trainer.current_epoch]
schedule = trainer.lr_scheduler_configs[0].scheduler
Path("result.json").write_text(json.dumps([*ended, schedule.num_bad_epochs, *schedule.get_last_lr()]))
