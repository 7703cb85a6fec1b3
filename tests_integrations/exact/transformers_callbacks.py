"""Callbacks that anneal dropout, a loss of its own, accumulation, noise in the collator."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class AnnealDropout(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        p = 0.2 * (1 - state.global_step / max(1, state.max_steps))
        for m in model.modules():
            if isinstance(m, torch.nn.Dropout):
                m.p = p


class Seen(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        print(metrics["eval_loss"])


class SmoothTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        labels = inputs["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].transpose(1, 2), labels, label_smoothing=0.1)
        return (loss, out) if return_outputs else loss


def collate(rows):
    ids = torch.stack([r["input_ids"] for r in rows])
    mask = torch.rand(ids.shape) < 0.1
    return {"input_ids": ids.masked_fill(mask, 0), "labels": ids}


set_seed(0)
rows = torch.randint(1, 48, (44, 12))
train = [{"input_ids": r} for r in rows[:36]]
val = [{"input_ids": r} for r in rows[36:]]
model = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=12, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    warmup_steps=3,
    lr_scheduler_type="cosine",
    weight_decay=0.1,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    logging_steps=2,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
)
resilient = ResilientCallback()
trainer = SmoothTrainer(
    model,
    args,
    train_dataset=train,
    eval_dataset=val,
    data_collator=collate,
    callbacks=[AnnealDropout(), Seen(), resilient],
)
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(trainer.model.state_dict(), "model.pt")
