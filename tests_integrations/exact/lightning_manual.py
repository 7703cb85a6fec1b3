"""Manual optimization of a GAN with two optimizers; the module keeps an average of the weights as a buffer."""

import lightning
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class GAN(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 4))
        self.judge = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
        self.register_buffer("ema", self.maker[0].weight.detach().clone())

    def training_step(self, batch):
        maker, judge = self.optimizers()
        fake = self.maker(torch.randn(len(batch[0]), 3))
        judge.zero_grad()
        softplus = nn.functional.softplus
        self.manual_backward(softplus(-self.judge(batch[0])).mean() + softplus(self.judge(fake.detach())).mean())
        judge.step()
        maker.zero_grad()
        self.manual_backward(softplus(-self.judge(fake)).mean())
        maker.step()
        self.ema.mul_(0.9).add_(self.maker[0].weight.detach(), alpha=0.1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.maker.parameters(), lr=0.01), torch.optim.Adam(self.judge.parameters(), lr=0.01)


lightning.seed_everything(7)
model = GAN()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[resilient],
)  # fmt: skip
loader = ResumableLoader(TensorDataset(torch.randn(48, 4)), batch_size=8, shuffle=True)
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save(model.state_dict(), "model.pt")
