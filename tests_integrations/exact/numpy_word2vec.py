"""Embeddings with negative samples, nested loops, and sentences that are passed over after a restart."""

import json
import random

import numpy as np

import mizzen

random.seed(0)
np.random.seed(0)
corpus = [[random.randrange(20) for _ in range(8)] for _ in range(12)]
vocab, dim, total = 20, 6, 12 * 3
W = {"in": np.random.uniform(-0.1, 0.1, (vocab, dim)), "out": np.zeros((vocab, dim))}
neg_rng = np.random.default_rng(5)
ck = mizzen.Checkpointer()
ck.track(W=W, negatives=neg_rng)
done = ck.restore()
sentences_seen = done
loss_ema = None
for epoch in range(done // len(corpus), 3):
    for s, sentence in enumerate(corpus):
        if epoch * len(corpus) + s < done:
            continue
        lr = 0.1 * (1 - sentences_seen / total)
        for i, center in enumerate(sentence):
            window = random.randint(1, 3)
            for j in range(max(0, i - window), min(len(sentence), i + window + 1)):
                if i == j:
                    continue
                targets = [sentence[j], *neg_rng.integers(0, vocab, 3)]
                labels = np.array([1.0, 0, 0, 0])
                h = W["in"][center].copy()
                p = 1 / (1 + np.exp(-W["out"][targets] @ h))
                g = lr * (labels - p)
                W["in"][center] += g @ W["out"][targets]
                np.add.at(W["out"], targets, np.outer(g, h))
                loss = -np.log(np.where(labels, p, 1 - p) + 1e-9).sum()
                loss_ema = loss if loss_ema is None else 0.99 * loss_ema + 0.01 * loss
        sentences_seen += 1
        if sentences_seen % 10 == 0:
            print(f"{sentences_seen}/{total} loss {loss_ema:.3f}")
        ck.step(sentences_seen)
with open("result.json", "w") as f:
    json.dump({k: v.tolist() for k, v in W.items()}, f)
