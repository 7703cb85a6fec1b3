"""The size of the images and some of them to look at are taken from the loader after the restore; noise in the data."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Images(Dataset):
    def __init__(self):
        self.images, self.noise = torch.randn(48, 10), np.random.default_rng(2)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        image = self.images[index] * torch.rand(()) + float(self.noise.normal(scale=0.1))
        return image, int(self.images[index].sum() > 0)


torch.manual_seed(0)
loader = ResumableLoader(DataLoader(Images(), batch_size=6, shuffle=True))
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step = checkpointer.restore()
mean = torch.cat([images for images, _ in loader]).mean(0)
shown, _ = next(iter(loader))
looks = []
for _ in range(loader.epoch, 4):
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images - mean), labels).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)
    with torch.no_grad():
        looks.append(model.eval()(shown))
        model.train()

torch.save([model.state_dict(), optimizer.state_dict(), shown, mean, looks[-1]], "model.pt")
