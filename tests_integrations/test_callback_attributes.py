"""Plain attributes of Lightning's callbacks, with a script that is started with other callbacks."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader


class Count(L.Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, *_: Any) -> None:
        """Count."""
        self.batches += 1


class Other(L.Callback):
    """Has an attribute of the same name."""

    def __init__(self) -> None:
        self.batches = -1


class Lit(L.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        return self.line(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_callback_gets_its_own_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the callback that was in its place in the list."""
    monkeypatch.chdir(tmp_path)

    def fit(epochs: int, *callbacks: L.Callback) -> None:
        resilient = ResilientCallback(Checkpointer(tmp_path / "root", interval_s=0))
        loader: DataLoader[Any] = ResumableLoader(TensorDataset(torch.ones(6, 1)), batch_size=2)
        L.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*callbacks, resilient],
        ).fit(Lit(), loader, ckpt_path=resilient.latest())  # fmt: skip

    fit(1, Count())
    count, other = Count(), Other()
    fit(2, other, count)
    assert (other.batches, count.batches) == (-1, 6)
