"""A Trainer and a callback of the script's own whose attributes begin with None: averages, a window, the best state."""

import copy
from collections import defaultdict, deque

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from mizzen.integrations.transformers import ResilientCallback


class Ema:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model):
        with torch.no_grad():
            for n, p in model.named_parameters():
                self.shadow[n].lerp_(p, 1 - self.decay)


class Monitor(TrainerCallback):
    def __init__(self):
        self.window, self.ema, self.best_state, self.counts, self.bad = None, None, None, None, None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.ema is None:
            self.ema, self.counts = Ema(model, 0.9), defaultdict(int)
        self.ema.update(model)
        self.counts[state.global_step % 3] += 1

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "loss" not in logs:
            return
        if self.window is None:
            self.window = deque(maxlen=4)
        norm = float(sum(p.detach().norm() for p in model.parameters()))
        if not self.window or norm < min(self.window):
            self.bad, self.best_state = None, copy.deepcopy(self.ema.shadow)
        else:
            self.bad = 1 if self.bad is None else self.bad + 1
        self.window.append(norm)
        if self.bad is not None and self.bad >= 3:
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.lerp_(self.best_state[n], 0.1 / self.counts[0])
            self.bad = None


class Weighted(Trainer):
    centre = None
    difficulty = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        mean = out.logits.detach().mean(0)
        self.centre = mean if self.centre is None else 0.9 * self.centre + 0.1 * mean
        self.difficulty = 1.0 if self.difficulty is None else self.difficulty * 0.97
        loss = out.loss * self.difficulty + 0.1 * (out.logits - self.centre).pow(2).mean()
        return (loss, out) if return_outputs else loss


set_seed(4)
rows = [{"input_ids": torch.randint(0, 32, (6,)), "labels": n % 2} for n in range(32)]
model = BertForSequenceClassification(
    BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=5e-3,
    report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1, save_strategy="no", neftune_noise_alpha=5.0,
)  # fmt: skip
monitor, resilient = Monitor(), ResilientCallback()
trainer = Weighted(model, args, train_dataset=rows, callbacks=[monitor, resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save(
    [model.state_dict(), monitor.ema.shadow, monitor.best_state, dict(monitor.counts), trainer.centre], "model.pt"
)
