"""Trains with Lightning, with stochastic weight averaging and gradients accumulated over batches."""

import json
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils import data

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Classifier(lightning.LightningModule):
    """A small network with dropout, and with batch norms, whose statistics weight averaging updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


lightning.seed_everything(1)
dataset = data.TensorDataset(torch.randn(192, 20), torch.randint(0, 3, (192,)))
loader = ResumableLoader(dataset, batch_size=16, shuffle=True)
model = Classifier()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=5,
    accumulate_grad_batches=3,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    accelerator="cpu",
    callbacks=[StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=2), resilient],
)
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save(model.state_dict(), "model.pt")
Path("result.json").write_text(json.dumps([trainer.global_step, trainer.current_epoch]))
