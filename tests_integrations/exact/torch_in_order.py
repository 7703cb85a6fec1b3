"""The data are iterated in order; evaluations within the epoch use a plain loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(0)
data = TensorDataset(torch.randn(42, 8), torch.randn(42, 1))
loader = ResumableLoader(DataLoader(data, batch_size=6, num_workers=1, persistent_workers=True))
test_loader = DataLoader(data, batch_size=21, shuffle=False)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step = checkpointer.restore()
losses = checkpointer.progress.setdefault("losses", [])
while loader.epoch < 4:
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            with torch.no_grad():
                losses.append(sum(float(nn.functional.mse_loss(model(x), y)) for x, y in test_loader))
        checkpointer.step(step)

torch.save([model.state_dict(), optimizer.state_dict(), losses], "model.pt")
