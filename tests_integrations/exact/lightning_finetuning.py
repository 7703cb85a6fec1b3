"""Lightning's own callback for fine-tuning, which adds the backbone to the optimizer after an epoch."""

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import TensorDataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        opt = torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)]


L.seed_everything(2)
data = TensorDataset(torch.randn(40, 6), torch.randint(0, 2, (40,)))
model, resilient = Net(), ResilientCallback()
finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.5, backbone_initial_lr=1e-3)
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[finetuning, resilient], log_every_n_steps=2,
)  # fmt: skip
trainer.fit(model, ResumableLoader(data, batch_size=5, shuffle=True), ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
