"""Masked language modelling: the collator draws the masks, the model has dropout."""

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


def mask(rows):
    tokens = torch.stack([row["input_ids"] for row in rows])
    hidden = torch.rand(tokens.shape) < 0.3
    return {"input_ids": tokens.masked_fill(hidden, 1), "labels": tokens.masked_fill(~hidden, -100)}


set_seed(1)
data = [{"input_ids": row} for row in torch.randint(2, 48, (40, 10))]
config = BertConfig(
    vocab_size=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=16,
)  # fmt: skip
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-3, report_to="none", use_cpu=True,
    save_strategy="no", remove_unused_columns=False,
)  # fmt: skip
resilient = ResilientCallback()
trainer = Trainer(BertForMaskedLM(config), args, train_dataset=data, data_collator=mask, callbacks=[resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
