"""Active learning: labelled samples join the subset after each epoch; pseudo-labels are written into the data."""

import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(8)
x = torch.randn(60, 4)
data = TensorDataset(x, (x[:, 0] > 0).float())
train, pool = Subset(data, list(range(16))), list(range(16, 60))
loader = ResumableLoader(train, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
chosen = {"indices": train.indices, "pool": pool}
checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader, chosen=chosen)
step = checkpointer.restore()
for _ in range(loader.epoch, 4):
    model.train()
    for a, b in loader:
        optimizer.zero_grad()
        out = model(a).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(out, b).backward()
        optimizer.step()
        step += 1
        checkpointer.step(step)
    model.eval()
    with torch.no_grad():
        scores = model(x[pool]).squeeze(1)
    order = scores.abs().argsort().tolist()
    added = [pool[i] for i in order[:6]]
    for i in added:
        train.indices.append(i)
        pool.remove(i)
torch.save([model.state_dict(), train.indices, pool], "model.pt")
