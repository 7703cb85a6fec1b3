"""Batches of similar lengths, the best model by accuracy, noise in the collator."""

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from mizzen.integrations.transformers import ResilientCallback


class Texts(Dataset):
    def __init__(self, n, seed):
        g = np.random.RandomState(seed)
        self.rows = [g.randint(1, 40, g.randint(3, 12)).tolist() for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "label": int(sum(self.rows[i]) % 2), "length": len(self.rows[i])}


def pad(features):
    width = max(len(f["input_ids"]) for f in features)
    ids = torch.tensor([f["input_ids"] + [0] * (width - len(f["input_ids"])) for f in features])
    drop = torch.rand(ids.shape) < 0.05
    return {
        "input_ids": ids.masked_fill(drop, 39),
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([f["label"] for f in features]),
    }


def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def main():
    set_seed(21)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
    )
    args = TrainingArguments(
        output_dir="out",
        max_steps=20,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        learning_rate=1e-2,
        train_sampling_strategy="group_by_length",
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        label_smoothing_factor=0.1,
        max_grad_norm=0.5,
    )
    resilient = ResilientCallback()
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Texts(38, 0),
        eval_dataset=Texts(16, 1),
        data_collator=pad,
        compute_metrics=compute_metrics,
        callbacks=[resilient],
    )
    trainer.train(resume_from_checkpoint=resilient.latest())
    torch.save(trainer.model.state_dict(), "model.pt")


main()
