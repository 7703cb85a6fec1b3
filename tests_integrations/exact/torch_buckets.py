"""Texts of unlike lengths in buckets that are shuffled in place; padded by the collator; accumulated gradients."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Buckets(Sampler):
    def __init__(self, lengths, size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[start : start + size] for start in range(0, len(order), size)]

    def __iter__(self):
        random.shuffle(self.batches)
        yield from self.batches

    def __len__(self):
        return len(self.batches)


def collate(texts):
    tokens = pad_sequence(texts, batch_first=True)
    return tokens.masked_fill(torch.rand(tokens.shape) < 0.15, 1), tokens


random.seed(5)
torch.manual_seed(5)
texts = [torch.randint(2, 32, (random.randint(3, 12),)) for _ in range(64)]
buckets = Buckets([len(text) for text in texts], 8)
loader = ResumableLoader(DataLoader(texts, batch_sampler=buckets, collate_fn=collate, num_workers=2))
model = nn.Sequential(nn.Embedding(32, 16), nn.Dropout(0.1), nn.Linear(16, 32))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, loader=loader)
step, pending = checkpointer.restore(), 0
for _ in range(loader.epoch, 4):
    for masked, tokens in loader:
        loss = nn.functional.cross_entropy(model(masked).flatten(0, 1), tokens.flatten())
        (loss / 2).backward()
        pending += 1
        if pending == 2:
            pending = 0
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpointer.step(step)

torch.save(model.state_dict(), "model.pt")
