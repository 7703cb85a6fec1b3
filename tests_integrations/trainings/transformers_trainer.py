"""Trains with the Trainer of transformers, which keeps one checkpoint and the best model.

Its output folder already contains an old checkpoint.
"""

import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback

old = Path("out/checkpoint-999")
if not Path("ckpt").exists():
    old.mkdir(parents=True, exist_ok=True)
    (old / "model.safetensors").write_bytes(b"of another run")

set_seed(1)
rows = torch.randint(0, 64, (56, 16))
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out",
    num_train_epochs=4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    # The high learning rate makes the last evaluation the worst, so that the best model is not the last one.
    learning_rate=0.1,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    load_best_model_at_end=True,
    report_to="none",
    use_cpu=True,
)
resilient = ResilientCallback()
trainer = Trainer(model, args, train_dataset=data[:44], eval_dataset=data[44:], callbacks=[resilient])
trainer.train(resume_from_checkpoint=resilient.latest())

evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
kept = sorted(path.name for path in Path("out").iterdir())
best = trainer.state.best_model_checkpoint
torch.save(trainer.model.state_dict(), "model.pt")
Path("result.json").write_text(json.dumps([evaluations, best, kept, trainer.state.best_metric]))
