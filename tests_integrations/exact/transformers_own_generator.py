"""The collator is an object with a generator of its own, and the dataset uses Python's."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Windows(Dataset):
    def __init__(self):
        self.text = torch.randint(0, 32, (400,))

    def __len__(self):
        return 40

    def __getitem__(self, index):
        start = random.randrange(390)
        return self.text[start : start + 8]


class Drop:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, rows):
        tokens = torch.stack(rows)
        dropped = torch.from_numpy(self.rng.random(tokens.shape) < 0.1)
        return {"input_ids": tokens.masked_fill(dropped, 0), "labels": tokens}


set_seed(6)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none", use_cpu=True,
    save_strategy="no", remove_unused_columns=False,
)  # fmt: skip
resilient = ResilientCallback()
trainer = Trainer(model, args, train_dataset=Windows(), data_collator=Drop(1), callbacks=[resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
