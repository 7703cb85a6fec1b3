"""A test run that overfits a few batches, with a schedule by epoch."""

import lightning
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Regressor(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


lightning.seed_everything(3)
loader = ResumableLoader(TensorDataset(torch.randn(80, 6), torch.randn(80)), batch_size=8, shuffle=True)
model = Regressor()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=6, overfit_batches=4, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[resilient],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
