"""Two Trainers: pretraining whose epochs end early, then fine-tuning with model_init and a callback that sets options."""

import os

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from mizzen import Checkpointer
from mizzen.integrations.transformers import ResilientCallback


class Short(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 5 == 0


class Cool(TrainerCallback):
    def on_epoch_begin(self, args, state, control, optimizer=None, model=None, **kwargs):
        self.scale = float(torch.rand(()))
        optimizer.param_groups[0]["weight_decay"] = 0.1 * self.scale

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7:
            control.should_evaluate = True

    def on_evaluate(self, args, state, control, metrics=None, optimizer=None, **kwargs):
        if metrics["eval_loss"] > 0.5:
            optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def mask(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    hidden = torch.rand(ids.shape) < 0.3
    return {"input_ids": ids.masked_fill(hidden, 1), "labels": ids.masked_fill(~hidden, -100)}


set_seed(7)
root = os.environ["MIZZEN_CHECKPOINT_URI"]
data = [{"input_ids": row, "labels": int(row[0] > 16)} for row in torch.randint(0, 32, (30, 8))]
config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=8,
)  # fmt: skip
common = {"per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
args = TrainingArguments("out/1", num_train_epochs=2, learning_rate=1e-2, disable_tqdm=True, **common)
first = ResilientCallback(Checkpointer(f"{root}/1"))
pre = Trainer(BertForMaskedLM(config), args, train_dataset=data, data_collator=mask, callbacks=[Short(), first])
pre.train(resume_from_checkpoint=first.latest())


def init():
    model = BertForSequenceClassification(config)
    model.bert.load_state_dict(pre.model.bert.state_dict(), strict=False)
    return model


args = TrainingArguments(
    "out/2", num_train_epochs=2, gradient_accumulation_steps=3, gradient_checkpointing=True, optim="adafactor",
    learning_rate=1e-2, eval_strategy="no", disable_tqdm=True, torch_empty_cache_steps=2, **common,
)  # fmt: skip
second = ResilientCallback(Checkpointer(f"{root}/2"))
tune = Trainer(None, args, model_init=init, train_dataset=data, eval_dataset=data[:8], callbacks=[Cool(), second])
tune.train(resume_from_checkpoint=second.latest())
torch.save([pre.model.state_dict(), tune.model.state_dict(), tune.optimizer.state_dict()["param_groups"]], "model.pt")
