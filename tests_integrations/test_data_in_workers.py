"""Attributes of datasets and collators that a training changes: workers that start within a resumed epoch have them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

EPOCHS, STEPS = 4, 4


class Noisy(Dataset[torch.Tensor]):
    """Samples with a noise that the training changes."""

    def __init__(self) -> None:
        self.noise = 0.0

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.noise])


class Scaled:
    """A collator with a scale that the training changes."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        batch: torch.Tensor = default_collate(samples)
        return batch * self.scale


def train(folder: Path, workers: int, until: int, seen: list[Any]) -> None:
    """Trains from the last checkpoint until step `until`, with a checkpoint of each step."""
    data, collate = Noisy(), Scaled()
    model = torch.nn.Linear(1, 1)
    loader = ResumableLoader(data, 2, shuffle=True, collate_fn=collate, num_workers=workers)
    checkpointer = Checkpointer(folder, interval_s=0)
    checkpointer.track(model=model, loader=loader)
    step = checkpointer.restore()
    for epoch in range(loader.epoch, EPOCHS):
        if epoch == 1:  # As scripts do: only once.
            data.noise, collate.scale = 0.25, 2.0
        for batch in loader:
            seen.append(batch.flatten().tolist())
            step += 1
            checkpointer.step(step)
            if step == until:
                checkpointer.wait()
                return


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("until", [6, 10, 12, 14])
def test_workers_have_what_the_training_has_changed(workers: int, until: int, tmp_path: Path) -> None:
    """Batches of a training that was stopped within a later epoch are those of one that was not."""
    whole: list[Any] = []
    seen: list[Any] = []
    train(tmp_path / "whole", workers, EPOCHS * STEPS, whole)
    train(tmp_path / "stopped", workers, until, seen)
    train(tmp_path / "stopped", workers, EPOCHS * STEPS, seen)
    assert seen == whole
