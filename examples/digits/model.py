"""A network with one hidden layer, its hand-written gradients, and the sampling of its training data.

Shapes: a batch is (samples, 64) pixels in 0..1 and (samples,) labels 0..9. Everything is float64.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Weights = dict[str, Array]

PIXELS, CLASSES = 64, 10
TEST_SAMPLES = 297
LEARNING_RATE, MOMENTUM = 0.1, 0.9
NOISE = 0.05


def initial(rng: np.random.Generator, hidden: int) -> Weights:
    """Returns initial weights: `w1` (64, hidden), `b1` (hidden), `w2` (hidden, 10), `b2` (10)."""
    return {
        "w1": rng.standard_normal((PIXELS, hidden)) * np.sqrt(2 / PIXELS),
        "b1": np.zeros(hidden),
        "w2": rng.standard_normal((hidden, CLASSES)) * np.sqrt(2 / hidden),
        "b2": np.zeros(CLASSES),
    }


def zeros_like(weights: Weights) -> Weights:
    """Returns zeros in the shapes of `weights`."""
    return {name: np.zeros_like(array) for name, array in weights.items()}


def _logits(weights: Weights, images: Array) -> tuple[Array, Array]:
    hidden = np.maximum(images @ weights["w1"] + weights["b1"], 0.0)
    return hidden, hidden @ weights["w2"] + weights["b2"]


def loss_and_gradients(weights: Weights, images: Array, labels: Labels) -> tuple[float, Weights]:
    """Returns the cross-entropy and its gradients, both summed (not averaged) over the samples."""
    hidden, logits = _logits(weights, images)
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float((np.log(sums[:, 0]) - shifted[rows, labels]).sum())
    error = exponentials / sums
    error[rows, labels] -= 1.0
    back = (error @ weights["w2"].T) * (hidden > 0)
    gradients = {"w1": images.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error, "b2": error.sum(axis=0)}
    return loss, gradients


def update(weights: Weights, momentum: Weights, gradients: Weights) -> None:
    """Makes one step of SGD with momentum, in place. `gradients` are means over the batch."""
    for name, weight in weights.items():
        momentum[name] *= MOMENTUM
        momentum[name] += gradients[name]
        weight -= LEARNING_RATE * momentum[name]


def accuracy(weights: Weights, images: Array, labels: Labels) -> float:
    """Returns the share of the samples for which the most likely class is the label."""
    return float((_logits(weights, images)[1].argmax(axis=1) == labels).mean())


def digest(weights: Weights) -> str:
    """Returns the SHA-256 of all weights, sorted by name."""
    return hashlib.sha256(b"".join(weights[name].astype("<f8").tobytes() for name in sorted(weights))).hexdigest()


def flatten(gradients: Weights, *extra: float) -> Array:
    """Returns one vector to sum over the gang: the gradients, sorted by name, then `extra`."""
    return np.concatenate([*(gradients[name].ravel() for name in sorted(gradients)), np.array(extra)])


def unflatten(vector: Array, like: Weights) -> tuple[Weights, Array]:
    """Returns the gradients and the extra numbers of a vector made by `flatten`."""
    gradients, offset = {}, 0
    for name in sorted(like):
        gradients[name] = vector[offset : offset + like[name].size].reshape(like[name].shape)
        offset += like[name].size
    return gradients, vector[offset:]


@dataclass
class Sampler:
    """Draws each sample at most once an epoch, in shuffled order. An incomplete last batch is dropped."""

    order: npt.NDArray[np.int64]
    position: int

    @classmethod
    def start(cls, samples: int) -> "Sampler":
        """Returns a sampler of `samples` samples before its first epoch."""
        return cls(np.arange(samples), samples)

    def take(self, batch: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Returns the indices of the next `batch` samples. At the end of an epoch, `rng` shuffles the order again."""
        if self.position + batch > len(self.order):
            self.order, self.position = rng.permutation(len(self.order)), 0
        self.position += batch
        return self.order[self.position - batch : self.position]


@dataclass
class Training:
    """The complete state of a training, as saved in a checkpoint."""

    weights: Weights
    momentum: Weights
    sampler: Sampler
    rng: np.random.Generator
    step: int = 0

    @classmethod
    def start(cls, seed: int, hidden: int, samples: int) -> "Training":
        """Returns the state before the first step."""
        rng = np.random.default_rng(seed)
        weights = initial(rng, hidden)
        return cls(weights, zeros_like(weights), Sampler.start(samples), rng)

    def state(self) -> dict[str, Any]:
        """Returns the parts of a checkpoint."""
        return {
            "model": self.weights,
            "momentum": self.momentum,
            "sampler": {"order": self.sampler.order, "position": self.sampler.position},
            "rng": self.rng.bit_generator.state,
            "progress": {"step": self.step},
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "Training":
        """Returns the training that `state` was saved from."""
        rng = np.random.default_rng()
        rng.bit_generator.state = state["rng"]
        sampler = Sampler(state["sampler"]["order"], state["sampler"]["position"])
        return cls(state["model"], state["momentum"], sampler, rng, state["progress"]["step"])
