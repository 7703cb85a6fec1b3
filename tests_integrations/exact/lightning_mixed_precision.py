"""bfloat16, accumulated gradients, clipped gradients, and a warm-up by step."""

import lightning
import torch
from torch import nn
from torch.utils.data import Dataset

from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Noisy(Dataset):
    def __init__(self):
        self.inputs, self.rng = torch.randn(50, 8), torch.Generator().manual_seed(9)

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8, generator=self.rng), index % 4


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 4))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


lightning.seed_everything(6)
model = Classifier()
resilient = ResilientCallback()
trainer = lightning.Trainer(
    max_epochs=4, precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=0.5, accelerator="cpu",
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[resilient],
)  # fmt: skip
trainer.fit(model, ResumableLoader(Noisy(), batch_size=5, shuffle=True), ckpt_path=resilient.latest())
torch.save([model.state_dict(), trainer.optimizers[0].state_dict()], "model.pt")
