"""Two loaders of unlike lengths in a zip, sparse embeddings with SparseAdam, spectral norm, schedules in sequence."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(30, 8, sparse=True)
        self.body = nn.Sequential(spectral_norm(nn.Linear(8, 12)), nn.ReLU(), nn.Dropout(0.2))
        self.head = weight_norm(nn.Linear(12, 2))

    def forward(self, ids):
        hidden = checkpoint(self.body, self.words(ids), use_reentrant=False)
        return self.head(hidden)


torch.manual_seed(2)
ids, labels = torch.randint(0, 30, (70, 6)), torch.randint(0, 2, (70,))
known = ResumableLoader(TensorDataset(ids[:24], labels[:24]), batch_size=4, shuffle=True)
free = ResumableLoader(DataLoader(TensorDataset(ids[24:]), batch_size=5, shuffle=True, drop_last=True), seed=4)
model = Net()
sparse = torch.optim.SparseAdam(model.words.parameters(), lr=0.02)
dense = torch.optim.NAdam([*model.body.parameters(), *model.head.parameters()], lr=0.02)
schedules = torch.optim.lr_scheduler
first, later = schedules.LinearLR(dense, 0.1, total_iters=4), schedules.CosineAnnealingWarmRestarts(dense, 5, 2)
scheduler = schedules.SequentialLR(dense, [first, later], milestones=[4])
checkpointer = Checkpointer()
checkpointer.track(model=model, sparse=sparse, dense=dense, scheduler=scheduler, known=known, free=free)
step = checkpointer.restore()
for _ in range(known.epoch, 4):
    for (a, b), (c,) in zip(known, free):
        with torch.no_grad():
            target = model(c).softmax(1)
        loss = nn.functional.cross_entropy(model(a), b) + 0.3 * nn.functional.cross_entropy(model(c), target)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        scheduler.step()
        step += 1
        checkpointer.step(step)
torch.save([model.state_dict(), dense.state_dict(), scheduler.state_dict()["_last_lr"], step], "model.pt")
