"""A small language model as in nanoGPT: a memory map, a batch that is fetched ahead, the best loss, accumulation."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mizzen import Checkpointer

batch_size, block_size, max_iters, eval_interval, grad_accum = 4, 8, 30, 6, 2
torch.manual_seed(1337)
if not Path("train.bin").exists():
    np.random.default_rng(0).integers(0, 48, 3000).astype(np.uint16).tofile("train.bin")


def get_batch(split):
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    data = data[:2700] if split == "train" else data[2700:]
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self, n=16):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.qkv, self.proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.block, self.head = nn.Embedding(48, 16), Block(), nn.Linear(16, 48, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        logits = self.head(self.block(self.wte(idx)))
        return logits, F.cross_entropy(logits.view(-1, 48), targets.view(-1))


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(3)
        for k in range(3):
            losses[k] = model(*get_batch(split))[1].item()
        out[split] = losses.mean().item()
    model.train()
    return out


def get_lr(it):
    return 1e-2 * (it + 1) / 5 if it < 5 else 1e-3 + 0.5 * (1 + math.cos(math.pi * it / max_iters)) * 9e-3


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}])
ckpt = Checkpointer()
ckpt.track(model=model, optimizer=optimizer)
ckpt.progress["best_val_loss"] = 1e9
ckpt.progress["batch"] = get_batch("train")
iter_num = ckpt.restore()
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if losses["val"] < ckpt.progress["best_val_loss"]:
            ckpt.progress["best_val_loss"] = losses["val"]
    for _ in range(grad_accum):
        logits, loss = model(*ckpt.progress["batch"])
        ckpt.progress["batch"] = get_batch("train")
        (loss / grad_accum).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    ckpt.step(iter_num)
    if iter_num > max_iters:
        break
torch.save([model.state_dict(), optimizer.state_dict(), ckpt.progress["best_val_loss"]], "model.pt")
