"""Evaluations and the Trainer's own saves within epochs; the best model is loaded at the end."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


def collate(rows):
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {
        "input_ids": torch.where(torch.rand(tokens.shape) < 0.1, 0, tokens),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


set_seed(4)
rows = torch.randint(1, 32, (48, 8))
data = [{"input_ids": row, "labels": int(row.sum()) % 2} for row in rows]
config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=8,
)  # fmt: skip
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, learning_rate=5e-3, eval_strategy="steps", eval_steps=4,
    save_strategy="steps", save_steps=4, save_total_limit=1, load_best_model_at_end=True, report_to="none",
    use_cpu=True, remove_unused_columns=False,
)  # fmt: skip
resilient = ResilientCallback()
model = BertForSequenceClassification(config)
trainer = Trainer(
    model, args, data_collator=collate, train_dataset=data[:36], eval_dataset=data[36:], callbacks=[resilient]
)
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
