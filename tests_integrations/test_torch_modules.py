"""The modules, optimizers and schedules of torch itself: a training with one of them is not warned of."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

from mizzen import Checkpointer
from mizzen.checkpoint import CheckpointWarning

WIDTH = 8
MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(WIDTH, 4, num_layers=2, dropout=0.1),
    "GRU": lambda: nn.GRU(WIDTH, 4, bidirectional=True),
    "RNN": lambda: nn.RNN(WIDTH, 4),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "norms": lambda: nn.Sequential(nn.InstanceNorm1d(5, affine=True, track_running_stats=True), nn.LayerNorm(WIDTH)),
    "dropouts": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(), nn.PReLU(), nn.AlphaDropout(0.1)),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.ConvTranspose1d(4, 5, 3)),
}


class Alias(nn.Module):
    """A module that also holds its parameters in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.decayed = [one for one in self.parameters() if one.ndim > 1]
        self.by_name = dict(self.inner.named_parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product with the weights."""
        return self.inner(x) + 0.1 * sum(one.pow(2).sum() for one in self.decayed)  # type: ignore[no-any-return]


def warned_of(folder: Path, step: Callable[[], object], **tracked: Any) -> list[str]:
    """Returns the warnings about checkpoints in six steps, each with a save."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer = Checkpointer(folder, interval_s=0)
        checkpointer.track(**tracked)
        for number in range(checkpointer.restore(), 6):
            step()
            checkpointer.step(number + 1)
    return [str(one.message) for one in caught if issubclass(one.category, CheckpointWarning)]


@pytest.mark.parametrize("name", [*MODULES, "Alias"])
def test_modules(tmp_path: Path, name: str) -> None:
    """Also those with private attributes that hold their parameters, such as `_flat_weights`."""
    module = Alias() if name == "Alias" else MODULES[name]()
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        found = module(torch.randn(3, 5, WIDTH))
        optimizer.zero_grad()
        (found[0] if isinstance(found, tuple) else found).pow(2).sum().backward()
        optimizer.step()

    assert warned_of(tmp_path, step, module=module, optimizer=optimizer) == []


def _kinds(module: Any, base: type) -> list[str]:
    found = [(name, one) for name, one in vars(module).items() if inspect.isclass(one) and issubclass(one, base)]
    return sorted(name for name, one in found if one is not base)


@pytest.mark.parametrize("name", set(_kinds(torch.optim, torch.optim.Optimizer)) - {"SparseAdam", "Muon"})
def test_optimizers(tmp_path: Path, name: str) -> None:
    """All that train a module with dense gradients."""
    module = nn.Linear(WIDTH, WIDTH)
    optimizer = getattr(torch.optim, name)(module.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = module(torch.randn(3, WIDTH)).pow(2).sum()
        found.backward()
        return found  # type: ignore[no-any-return]

    assert warned_of(tmp_path, lambda: optimizer.step(loss), module=module, optimizer=optimizer) == []


ARGUMENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "LambdaLR": lambda _: (lambda epoch: 0.9**epoch,),
    "MultiplicativeLR": lambda _: (lambda _: 0.9,),
    "StepLR": lambda _: (2,),
    "MultiStepLR": lambda _: ([2, 3],),
    "ExponentialLR": lambda _: (0.9,),
    "SequentialLR": lambda one: ([lr_scheduler.ConstantLR(one), lr_scheduler.ExponentialLR(one, 0.9)], [2]),
    "CosineAnnealingLR": lambda _: (5,),
    "CyclicLR": lambda _: (0.01, 0.1, 2),
    "CosineAnnealingWarmRestarts": lambda _: (2,),
    "OneCycleLR": lambda _: (0.1, 9),
}


@pytest.mark.parametrize(
    "name", set(_kinds(lr_scheduler, lr_scheduler.LRScheduler)) - {"ChainedScheduler", "SWALR", "_LRScheduler"}
)
def test_schedules(tmp_path: Path, name: str) -> None:
    """All of torch's schedules."""
    module = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = getattr(lr_scheduler, name)(optimizer, *ARGUMENTS.get(name, lambda _: ())(optimizer))

    def step() -> None:
        optimizer.zero_grad()
        loss = module(torch.randn(3, WIDTH)).pow(2).sum()
        loss.backward()
        optimizer.step()
        schedule.step(*((loss.item(),) if name == "ReduceLROnPlateau" else ()))

    assert warned_of(tmp_path, step, module=module, optimizer=optimizer, schedule=schedule) == []
