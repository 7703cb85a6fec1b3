"""Lightning finds the learning rate before the training; the module saves more in hooks of its own."""

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lr = 1e-3
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 2))
        self.history = {}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint):
        self.history = checkpoint["history"]

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.history[self.global_step] = float(loss)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=5)
        return [opt], [{"scheduler": warm, "interval": "step"}]

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.history and len(self.history) % 4 == 0:
            optimizer.param_groups[0]["weight_decay"] = 0.01 * min(self.history.values())


L.seed_everything(5)
loader = ResumableLoader(TensorDataset(torch.randn(48, 6), torch.randint(0, 2, (48,))), batch_size=6, shuffle=True)
model, resilient = Net(), ResilientCallback()
trainer = L.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[LearningRateFinder(num_training_steps=20), resilient],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict(), model.lr], "model.pt")
