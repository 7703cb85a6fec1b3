"""An average of the weights, a schedule, a limit of gradients and early stopping of the script's own classes."""

import time
from collections import defaultdict
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Average:
    """An exponential moving average of the weights."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model):
        for name, value in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(value.detach(), alpha=1 - self.decay)

    def copy_to(self, model):
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(self.shadow[name])


class Warmup:
    """A schedule, which counts the steps."""

    def __init__(self, optimizer, steps):
        self.optimizer, self.steps, self.done = optimizer, steps, 0

    def step(self):
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, self.done / self.steps)


class Limit:
    """Limits gradients to the median of the last norms."""

    def __init__(self):
        self.norms = []

    def __call__(self, parameters):
        limit = float(np.median(self.norms[-10:])) if self.norms else 1.0
        self.norms.append(nn.utils.clip_grad_norm_(parameters, limit).item())


class Patience:
    """Early stopping."""

    def __init__(self, epochs):
        self.epochs, self.best, self.bad = epochs, float("inf"), 0

    def __call__(self, value):
        self.best, self.bad = (value, 0) if value < self.best else (self.best, self.bad + 1)
        return self.bad >= self.epochs


class Criterion:
    """A loss that also counts, for the log."""

    def __init__(self):
        self.calls, self.losses = 0, []

    def __call__(self, predicted, wanted):
        self.calls += 1
        loss = nn.functional.mse_loss(predicted, wanted)
        self.losses.append(loss.item())
        return loss


times = defaultdict(float)


@contextmanager
def timed(name):
    """Sums how long a part takes."""
    began = time.perf_counter()
    yield
    times[name] += time.perf_counter() - began


def validate(model, inputs, targets):
    """Returns the loss on the validation data."""
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs), targets).item()
    model.train()
    return loss


def main():
    """Trains."""
    torch.manual_seed(0)
    inputs = torch.randn(80, 5)
    targets = inputs.sum(1, keepdim=True).tanh()
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    loader = ResumableLoader(TensorDataset(inputs[:64], targets[:64]), batch_size=8, shuffle=True)
    average, warmup, limit, patience = Average(model, 0.9), Warmup(optimizer, 12), Limit(), Patience(3)
    criterion = Criterion()
    checkpointer = Checkpointer()
    checkpointer.track(model=model, optimizer=optimizer, loader=loader)
    checkpointer.track(average=average, warmup=warmup, limit=limit, patience=patience)
    checkpointer.progress["stopped"] = False
    step = checkpointer.restore()
    for epoch in range(loader.epoch, 6):
        if checkpointer.progress["stopped"]:
            break
        for batch, wanted in loader:
            with timed("step"):
                loss = criterion(model(batch), wanted)
                optimizer.zero_grad()
                loss.backward()
                limit(model.parameters())
                optimizer.step()
                warmup.step()
                average.update(model)
            step += 1
            checkpointer.step(step)
        if patience(validate(model, inputs[64:], targets[64:])):
            checkpointer.progress["stopped"] = True
        print(epoch, criterion.calls, np.mean(criterion.losses[-8:]), times["step"] > 0)
    average.copy_to(model)
    torch.save([model.state_dict(), optimizer.state_dict(), patience.best, warmup.done, limit.norms], "model.pt")


if __name__ == "__main__":
    main()
