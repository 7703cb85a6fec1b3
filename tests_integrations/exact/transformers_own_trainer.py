"""An own Trainer with a running weight, an own optimizer, early stopping that stops, an average of the weights."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Clip(torch.optim.AdamW):
    _norms = None

    def step(self, closure=None):
        n = float(
            torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        )
        self._norms = n if self._norms is None else 0.9 * self._norms + 0.1 * n
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.grad.mul_(min(1.0, self._norms / (n + 1e-6)))
        return super().step(closure)


class Ema(TrainerCallback):
    def __init__(self):
        self._shadow, self._n = None, 0

    def on_step_end(self, args, state, control, model=None, **k):
        if self._shadow is None:
            self._shadow = copy.deepcopy(model.state_dict())
        self._n += 1
        for key, v in model.state_dict().items():
            if v.is_floating_point():
                self._shadow[key].mul_(0.9).add_(v, alpha=0.1)


class Stop(TrainerCallback):
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, None, 0

    def on_evaluate(self, args, state, control, metrics=None, **k):
        if self.best is None or metrics["eval_loss"] < self.best - 0.05:
            self.best, self.bad = metrics["eval_loss"], 0
        else:
            self.bad += 1
        if self.bad >= self.patience:
            control.should_training_stop = True


class Weighted(Trainer):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        self.weight, self._history = 1.0, []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        loss = out.loss * self.weight
        if model.training:
            self._history.append(float(out.loss))
            self.weight = 0.9 * self.weight + 0.1 * float(out.loss) / 4
        return (loss, out) if return_outputs else loss


set_seed(4)
ids = torch.randint(0, 20, (40, 6))
rows = [{"input_ids": r, "labels": r} for r in ids]
model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1))
opt = Clip(model.parameters(), lr=1e-2)
args = TrainingArguments(
    "out",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    logging_steps=50,
)
res, ema, stop = ResilientCallback(), Ema(), Stop(2)
tr = Weighted(
    model, args, train_dataset=rows[:32], eval_dataset=rows[32:], callbacks=[ema, stop, res], optimizers=(opt, None)
)
tr.train(resume_from_checkpoint=res.latest())
torch.save(
    [model.state_dict(), ema._shadow, ema._n, stop.best, stop.bad, tr.weight, tr._history, opt._norms], "model.pt"
)
