"""Noise in the dataset, which workers load; gradients accumulated; a cosine schedule."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Swapped(Dataset):
    def __init__(self):
        self.rows = torch.randint(0, 32, (44, 8))

    def __len__(self):
        return 44

    def __getitem__(self, index):
        row = self.rows[index].clone()
        row[np.random.randint(8)] = torch.randint(0, 32, ())
        return {"input_ids": row, "labels": row}


set_seed(2)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
    lr_scheduler_type="cosine", dataloader_num_workers=2, report_to="none", use_cpu=True, save_strategy="no",
)  # fmt: skip
resilient = ResilientCallback()
trainer = Trainer(model, args, train_dataset=Swapped(), callbacks=[resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
