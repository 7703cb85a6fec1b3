"""An optimizer and OneCycle of the script's own; the last batches of an epoch make a smaller step."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from mizzen.integrations.transformers import ResilientCallback


class Noisy(Dataset):
    def __init__(self):
        self.rows = torch.randint(0, 32, (42, 8))

    def __len__(self):
        return 42

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": torch.where(torch.rand(8) < 0.2, 0, row), "labels": row}


set_seed(8)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2))
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=3, report_to="none",
    use_cpu=True, save_strategy="no", eval_strategy="steps", eval_steps=3,
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
resilient = ResilientCallback()
trainer = Trainer(
    model, args, train_dataset=Noisy(), eval_dataset=Noisy(), optimizers=(optimizer, scheduler), callbacks=[resilient]
)
trainer.train(resume_from_checkpoint=resilient.latest())
torch.save([trainer.model.state_dict(), optimizer.state_dict()], "model.pt")
