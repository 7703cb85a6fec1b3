"""An evaluation after each epoch steers a plateau schedule and early stopping."""

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from mizzen.integrations.transformers import ResilientCallback


class Noisy(Dataset):
    def __init__(self, size, noise):
        self.rows, self.noise = torch.randint(0, 32, (size, 8)), noise

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        noisy = torch.where(torch.rand(8) < self.noise, torch.randint(0, 32, (8,)), row)
        return {"input_ids": noisy, "labels": int(row[0] > 15)}


set_seed(5)
config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=8,
)  # fmt: skip
args = TrainingArguments(
    "out", num_train_epochs=7, per_device_train_batch_size=8, learning_rate=2e-2, eval_strategy="epoch",
    save_strategy="epoch", lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0},
    load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=2, report_to="none", use_cpu=True,
)  # fmt: skip
resilient = ResilientCallback()
trainer = Trainer(
    BertForSequenceClassification(config), args, train_dataset=Noisy(40, 0.2), eval_dataset=Noisy(16, 0.0),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2), resilient],
)  # fmt: skip
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
