"""A Trainer whose workers persist, noisy embeddings, evaluations by step, and accumulation."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Texts(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.rows = torch.randint(0, 64, (n, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i].clone()
        drop = torch.rand(12) < 0.1
        return {"input_ids": row.masked_fill(drop, 0), "labels": row}


set_seed(8)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=12, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, learning_rate=5e-3, warmup_steps=4,
    dataloader_num_workers=1, dataloader_persistent_workers=True, eval_strategy="steps", eval_steps=4,
    gradient_accumulation_steps=2, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=3,
    neftune_noise_alpha=5.0, weight_decay=0.1, max_grad_norm=0.5, use_cpu=True,
)  # fmt: skip
resilient = ResilientCallback()
trainer = Trainer(model, args, train_dataset=Texts(28, 0), eval_dataset=Texts(8, 1), callbacks=[resilient])
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save([model.state_dict(), trainer.optimizer.state_dict(), trainer.lr_scheduler.state_dict()], "model.pt")
