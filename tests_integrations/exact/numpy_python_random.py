"""Word vectors trained with Python's own generator: a walk over a corpus, negative samples, a best state."""

import json
import random
from pathlib import Path

from mizzen import Checkpointer

random.seed(12)
corpus = [random.randrange(20) for _ in range(400)]
vectors = {"in": [[random.gauss(0, 0.1) for _ in range(4)] for _ in range(20)], "out": [[0.0] * 4 for _ in range(20)]}
progress = {"loss": 0.0, "best": None}


def pull(word, other, wanted, rate):
    a, b = vectors["in"][word], vectors["out"][other]
    error = wanted - 1 / (1 + 2.718281828 ** -sum(x * y for x, y in zip(a, b, strict=True)))
    for i in range(4):
        a[i], b[i] = a[i] + rate * error * b[i], b[i] + rate * error * a[i]
    return error * error


checkpointer = Checkpointer()
checkpointer.track(vectors=vectors, progress=progress)
step = checkpointer.restore()
while step < 50:
    loss = 0.0
    for _ in range(10):
        place = random.randrange(1, 399)
        loss += pull(corpus[place], corpus[place + random.choice([-1, 1])], 1, 0.1)
        loss += sum(pull(corpus[place], random.randrange(20), 0, 0.1) for _ in range(3))
    progress["loss"] = 0.9 * progress["loss"] + 0.1 * loss
    if progress["best"] is None or loss < progress["best"]:
        progress["best"] = loss
    step += 1
    checkpointer.step(step)

Path("result.json").write_text(json.dumps([vectors, progress]))
