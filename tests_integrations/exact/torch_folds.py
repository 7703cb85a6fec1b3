"""Cross-validation: a model for each fold, with checkpoints of its own; the scores are averaged at the end."""

import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(42)
X, y = torch.randn(36, 5), torch.randint(0, 2, (36,))
dataset = TensorDataset(X, y)
folds = np.array_split(np.random.RandomState(0).permutation(36), 3)
root, scores, weights = os.environ["MIZZEN_CHECKPOINT_URI"], [], []
for k, val_idx in enumerate(folds):
    train_idx = np.concatenate([f for i, f in enumerate(folds) if i != k])
    train = ResumableLoader(Subset(dataset, train_idx), batch_size=8, shuffle=True, seed=k)
    val = DataLoader(Subset(dataset, val_idx), batch_size=12)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    ckpt = Checkpointer(f"{root}/fold-{k}")
    ckpt.track(model=model, opt=opt, train=train)
    step = ckpt.restore()
    for _ in range(train.epoch, 2):
        model.train()
        for xb, yb in train:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
            step += 1
            ckpt.step(step)
    model.eval()
    with torch.no_grad():
        scores.append(sum((model(xb).argmax(1) == yb).sum().item() for xb, yb in val) / len(val_idx))
    weights.append(model.state_dict())
print(np.mean(scores), np.std(scores))
torch.save([scores, weights], "model.pt")
