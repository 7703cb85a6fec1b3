"""OneCycle over `estimated_stepping_batches`; noise in the dataset and the collator; dropout."""

import lightning
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Noisy(Dataset):
    def __init__(self):
        self.inputs = torch.randn(56, 8)

    def __len__(self):
        return 56

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8), index % 3


def collate(samples):
    inputs, labels = default_collate(samples)
    return inputs * (torch.rand(inputs.shape) > 0.1), labels


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


lightning.seed_everything(1)
loader = ResumableLoader(Noisy(), batch_size=8, shuffle=True, collate_fn=collate)
model = Classifier()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[resilient],
)  # fmt: skip
trainer.fit(model, loader, ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
