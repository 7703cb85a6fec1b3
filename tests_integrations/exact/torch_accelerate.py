"""Hugging Face's accelerate prepares model, optimizer and loader; gradients are accumulated over two batches."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Noisy(Dataset):
    def __init__(self):
        self.inputs = torch.randn(48, 8)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(8), int(self.inputs[index].sum() > 0)


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = ResumableLoader(DataLoader(Noisy(), batch_size=4, shuffle=True))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=prepared)
step = checkpointer.restore()
for _ in range(prepared.epoch, 4):
    for inputs, labels in prepared:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            checkpointer.step(step)

torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")
