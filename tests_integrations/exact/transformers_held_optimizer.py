"""An own Trainer trains a reward head with an optimizer and a schedule of its own in each step; losses are logged."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Rewarded(Trainer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.reward = nn.Linear(8, 1)
        self.reward_opt = torch.optim.AdamW(self.reward.parameters(), lr=0.05)
        self.reward_rate = torch.optim.lr_scheduler.ExponentialLR(self.reward_opt, 0.95)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs, output_hidden_states=True)
        last = out.hidden_states[-1].mean(1)
        if model.training:
            self.reward_opt.zero_grad()
            ((self.reward(last.detach()) - out.loss.detach()) ** 2).mean().backward()
            self.reward_opt.step()
            self.reward_rate.step()
        loss = out.loss + 0.1 * (self.reward(last).mean() - 1) ** 2
        return (loss, out) if return_outputs else loss


class Count:
    times = 0

    def __call__(self, prediction):
        self.times += 1
        return {"times": self.times}


set_seed(5)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 20, (36, 6))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=1))
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-2, save_strategy="no", report_to="none",
    use_cpu=True, disable_tqdm=True, eval_on_start=True, eval_strategy="epoch", logging_steps=5,
)  # fmt: skip
resilient = ResilientCallback()
trainer = Rewarded(
    model, args, train_dataset=rows, eval_dataset=rows[:6], compute_metrics=Count(), callbacks=[resilient]
)
trainer.train(resume_from_checkpoint=resilient.latest())
names = ("step", "loss", "eval_loss", "eval_times", "grad_norm", "learning_rate")
history = [[one.get(name) for name in names] for one in trainer.state.log_history]
torch.save([model.state_dict(), trainer.reward.state_dict(), trainer.reward_opt.state_dict(), history], "model.pt")
