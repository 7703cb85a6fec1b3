"""A Trainer with a weighted sampler, which draws from torch's global generator; label smoothing; frozen layers."""

import torch
from torch.utils.data import WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Balanced(Trainer):
    def _get_train_sampler(self, *args):
        weights = [3.0 if row["labels"] else 1.0 for row in self.train_dataset]
        return WeightedRandomSampler(weights, len(weights))


set_seed(7)
data = [{"input_ids": row, "labels": int(row[0] > 24)} for row in torch.randint(0, 32, (48, 8))]
config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=8,
)  # fmt: skip
model = BertForSequenceClassification(config)
model.bert.embeddings.requires_grad_(False)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, learning_rate=5e-3, warmup_steps=5, report_to="none",
    label_smoothing_factor=0.1, use_cpu=True, save_strategy="no",
)  # fmt: skip
resilient = ResilientCallback()
trainer = Balanced(model, args, train_dataset=data, callbacks=[resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
