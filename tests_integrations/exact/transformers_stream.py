"""An iterable dataset with noise; a number of steps instead of epochs; bfloat16 on the CPU."""

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for row in self.rows:
            noisy = torch.where(torch.rand(row.shape) < 0.2, torch.randint(0, 32, row.shape), row)
            yield {"input_ids": noisy, "labels": row}


set_seed(3)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out", max_steps=22, per_device_train_batch_size=4, learning_rate=1e-2, bf16=True, report_to="none", use_cpu=True,
    save_strategy="no",
)  # fmt: skip
resilient = ResilientCallback()
stream = Stream(torch.randint(0, 32, (36, 8)))
trainer = Trainer(model, args, train_dataset=stream, callbacks=[resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
