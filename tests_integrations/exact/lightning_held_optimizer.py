"""The module trains an auxiliary head with an optimizer of its own, a callback a probe; weights are averaged at the end.

The gradients are accumulated over more batches in later epochs.
"""

import lightning
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.aux = nn.Linear(8, 1), nn.Linear(8, 1)
        self.aux_opt = torch.optim.Adam(self.aux.parameters(), lr=0.02)
        self.aux_rate = torch.optim.lr_scheduler.StepLR(self.aux_opt, 5, 0.8)

    def training_step(self, batch):
        features = self.body(batch[0])
        with torch.enable_grad():
            self.aux_opt.zero_grad()
            nn.functional.mse_loss(self.aux(features.detach()), batch[1]).backward()
            self.aux_opt.step()
            self.aux_rate.step()
        return nn.functional.mse_loss(self.head(features) + self.aux(features).detach(), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.8)


class Probe(lightning.Callback):
    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(4))
        self.opt = torch.optim.Adam([self.weight], lr=0.1)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with torch.enable_grad():
            self.opt.zero_grad()
            ((batch[0] @ self.weight - batch[1][:, 0]) ** 2).mean().backward()
            self.opt.step()


lightning.seed_everything(3)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model, probe = Model(), Probe()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[
        GradientAccumulationScheduler({0: 1, 2: 3}), StochasticWeightAveraging(0.01, 2), probe, resilient,
    ],
)  # fmt: skip
trainer.fit(model, ResumableLoader(data, batch_size=8, shuffle=True), ckpt_path=resilient.latest())
torch.save([model.state_dict(), probe.weight.detach(), probe.opt.state_dict()], "model.pt")
