"""A weighted sampler in a wrapped loader with workers; a limited number of batches for each epoch."""

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Jittered(Dataset):
    def __init__(self):
        self.inputs = torch.randn(60, 6)

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.inputs[index] * float(np.random.uniform(0.9, 1.1)), float(index % 5)


class Regressor(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1].float())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        sampler = WeightedRandomSampler(torch.arange(60.0) + 1, 60)
        return ResumableLoader(DataLoader(Jittered(), batch_size=6, sampler=sampler, num_workers=1))


lightning.seed_everything(4)
model = Regressor()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=3, limit_train_batches=7, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[resilient],
)  # fmt: skip
trainer.fit(model, ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
