"""Lightning: hooks at the start and the end of the training draw numbers, keep the best weights, and load them."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class KeepBest(L.Callback):
    def on_train_start(self, trainer, module):
        self.best, self.weights = float("inf"), None

    def on_train_epoch_end(self, trainer, module):
        loss = float(trainer.callback_metrics["loss"])
        if loss < self.best:
            self.best = loss
            self.weights = {name: value.clone() for name, value in module.state_dict().items()}

    def on_train_end(self, trainer, module):
        module.load_state_dict(self.weights)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 2))

    def on_train_start(self):
        self.directions = torch.randn(12, 2)
        self.norms = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.net[:3](x)
        loss = nn.functional.cross_entropy(self.net[3](h) + 0.1 * h @ self.directions, y)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(sum(p.grad.norm() for p in self.parameters())))

    def on_train_end(self):
        with torch.no_grad():
            self.net[3].bias.sub_(0.01 * sum(self.norms) / len(self.norms))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.9, momentum=0.9)


L.seed_everything(11)
x = torch.randn(40, 5)
loader = ResumableLoader(DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, shuffle=True))
model, best, resilient = Lit(), KeepBest(), ResilientCallback()
trainer = L.Trainer(
    max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[best, resilient],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save([model.state_dict(), best.best, model.norms, float(trainer.callback_metrics["loss"])], "model.pt")
