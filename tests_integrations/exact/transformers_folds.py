"""Two trainings, each with its own root; transformers stores both models under other names than those in the model."""

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)  # fmt: skip

from mizzen.integrations.transformers import ResilientCallback

set_seed(6)
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
images = [{"pixel_values": torch.randn(3, 8, 8), "labels": at % 3} for at in range(30)]
texts = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (30, 8))]
vision = ViTConfig(image_size=8, patch_size=4, num_labels=3, **small)
words = MixtralConfig(vocab_size=32, num_key_value_heads=1, num_local_experts=2, **small)
made = (ViTForImageClassification(vision), images), (MixtralForCausalLM(words), texts)
for number, (model, data) in enumerate(made):
    resilient = ResilientCallback(f"ckpt/{number}")
    args = TrainingArguments(
        f"out/{number}", num_train_epochs=2, per_device_train_batch_size=4, learning_rate=5e-3, save_strategy="no",
        report_to="none", use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=[resilient])
    trainer.train(resume_from_checkpoint=resilient.latest())
torch.save([model.state_dict() for model, _ in made], "model.pt")
