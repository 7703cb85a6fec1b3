"""A language model on random windows of a text, without a loader; an average of the weights that the script holds."""

import math

import numpy as np
import torch
from torch import nn

from mizzen import Checkpointer

STEPS, BLOCK = 24, 12

torch.manual_seed(1337)
text = np.random.default_rng(0).integers(0, 32, 4000)
model = nn.Sequential(nn.Embedding(32, 24), nn.Dropout(0.1), nn.Linear(24, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
ema = {name: value.detach().clone() for name, value in model.state_dict().items()}
rates = np.random.default_rng(1)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, ema=ema, rates=rates)
step = checkpointer.restore()
while step < STEPS:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / STEPS)) * rates.uniform(0.9, 1.1)
    for _ in range(2):
        starts = torch.randint(len(text) - BLOCK - 1, (6,))
        x = torch.stack([torch.from_numpy(text[i : i + BLOCK]) for i in starts])
        y = torch.stack([torch.from_numpy(text[i + 1 : i + 1 + BLOCK]) for i in starts])
        (nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for name, value in model.state_dict().items():
        ema[name].mul_(0.9).add_(value, alpha=0.1)
    step += 1
    checkpointer.step(step)

torch.save([model.state_dict(), optimizer.state_dict(), ema], "model.pt")
