"""Images with noise from the dataset and the collator, both made by workers; dropout in the model."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Images(Dataset):
    def __init__(self, size):
        self.images = torch.randn(size, 1, 6, 6)
        self.labels = torch.randint(0, 3, (size,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index] + 0.1 * torch.randn(1, 6, 6)
        return (image.flip(-1) if np.random.rand() < 0.5 else image), self.labels[index]


def collate(samples):
    images, labels = default_collate(samples)
    return images * float(np.random.uniform(0.8, 1.2)), labels


torch.manual_seed(3)
np.random.seed(3)
loader = ResumableLoader(Images(48), batch_size=8, shuffle=True, num_workers=2, collate_fn=collate)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step = checkpointer.restore()
for _ in range(loader.epoch, 3):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)

torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")
