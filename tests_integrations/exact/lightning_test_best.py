"""Two trainings with a stop and a best checkpoint in the middle of epochs; the best weights are tested at the end."""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Net(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.log_dict({"val_loss": nn.functional.cross_entropy(out, batch[1])}, prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


L.seed_everything(3)
x = torch.randn(96, 5)
y = (x[:, 0] * x[:, 1] > 0).long()
train, held = TensorDataset(x[:64], y[:64]), DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16)
root, model = os.environ["MIZZEN_CHECKPOINT_URI"], Net(0.4)
found = []
for phase, epochs in enumerate((3, 6)):
    resilient = ResilientCallback(Checkpointer(f"{root}/phase-{phase}"))
    best = ModelCheckpoint(f"best-{phase}", monitor="val_loss", save_top_k=1, save_last=True)
    trainer = L.Trainer(
        max_epochs=epochs, min_epochs=2, val_check_interval=3, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=1 + phase,
        callbacks=[EarlyStopping("val_loss", patience=3, min_delta=0.01), best, resilient],
    )  # fmt: skip
    loader = ResumableLoader(train, batch_size=8, shuffle=True, seed=phase)
    trainer.fit(model, loader, held, ckpt_path=resilient.latest())
    tested = trainer.test(model, held, ckpt_path="best", verbose=False)
    found += [tested, float(best.best_model_score), trainer.global_step, trainer.current_epoch]
    model = Net.load_from_checkpoint(best.best_model_path)
torch.save([model.state_dict(), found], "model.pt")
