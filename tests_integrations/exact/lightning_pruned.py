"""A tenth of the weights is pruned after each epoch, and the others begin again; only the pruned model is kept."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


lightning.seed_everything(3)
model, resilient = Model(), ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[ModelPruning("l1_unstructured", amount=0.1), resilient],
)  # fmt: skip
loader = ResumableLoader(TensorDataset(torch.randn(48, 4), torch.randn(48, 1)), batch_size=8, shuffle=True)
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save(model.state_dict(), "model.pt")
