"""Trains a small GPT with batches that a thread prefetches. The saved position is that of the batches in use."""

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mizzen import Checkpointer

STEPS = 18


def batches(position: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields batches from `position` on, each with the position after it."""
    for number in range(position, STEPS):
        yield torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(number)), number + 1


def ahead(position: int, depth: int = 4) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields the same as `batches`, prefetched by a thread."""
    ready: queue.Queue[tuple[torch.Tensor, int] | None] = queue.Queue(depth)

    def fill() -> None:
        for batch in batches(position):
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := ready.get()) is not None:
        yield batch


torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
progress = {"position": 0, "losses": []}

checkpointer = Checkpointer()
checkpointer.track(model=model, optimizer=optimizer, scheduler=scheduler, progress=progress)
step = checkpointer.restore()
model.train()
for tokens, position in ahead(progress["position"]):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    progress["position"] = position
    progress["losses"].append(loss.item())
    step += 1
    checkpointer.step(step)

torch.save([model.state_dict(), optimizer.state_dict()], "model.pt")
Path("result.json").write_text(json.dumps(progress))
