"""A model with a temperature that a callback lowers, and a counter of its calls."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Tempered(GPT2LMHeadModel):
    def __init__(self, config):
        super().__init__(config)
        self.tau, self.seen = 2.0, 0

    def forward(self, *args, labels=None, **kwargs):
        self.seen += 1
        out = super().forward(*args, **kwargs)
        logits = out.logits / self.tau + 0.01 * (self.seen % 7)
        out.loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 32), labels[:, 1:].reshape(-1))
        return out


class Anneal(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.tau = max(1.0, model.tau * 0.95)


def collate(rows):
    n = max(len(r["input_ids"]) for r in rows)
    ids = torch.stack([nn.functional.pad(r["input_ids"], (0, n - len(r["input_ids"]))) for r in rows])
    noise = torch.rand(ids.shape) < 0.1
    return {"input_ids": torch.where(noise, torch.randint(0, 32, ids.shape), ids), "labels": ids}


set_seed(0)
data = [{"input_ids": torch.randint(0, 32, (6 + i % 5,))} for i in range(40)]
model = Tempered(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_steps=3,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
    remove_unused_columns=False,
    disable_tqdm=True,
    max_grad_norm=0.5,
    weight_decay=0.01,
)
resilient = ResilientCallback()
trainer = Trainer(model, args, train_dataset=data, data_collator=collate, callbacks=[Anneal(), resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(model.state_dict(), "model.pt")
