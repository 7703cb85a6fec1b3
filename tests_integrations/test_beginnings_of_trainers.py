"""How the trainings of Lightning and transformers begin: each with its own root, and from the loaded checkpoint."""

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

from mizzen.checkpoint import CheckpointWarning
from mizzen.integrations import lightning, transformers
from mizzen.integrations.files import ENDED
from mizzen.integrations.torch import ResumableLoader


class Line(L.LightningModule):
    """A line, for both libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Any, **_: Any) -> Any:
        """Return the loss."""
        return {"loss": self.line(x).sum()}

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        return self(batch[0])["loss"]

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


def lit(resilient: Any, found: str | None) -> None:
    """Trains with Lightning."""
    L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[resilient],
    ).fit(Line(), ResumableLoader(TensorDataset(torch.ones(6, 1)), batch_size=2), ckpt_path=found)  # fmt: skip


def trained(resilient: Any, found: str | None) -> None:
    """Trains with transformers."""
    args = TrainingArguments(
        "out", num_train_epochs=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    rows = [{"x": torch.ones(1)} for _ in range(6)]
    Trainer(Line(), args, train_dataset=rows, callbacks=[resilient]).train(resume_from_checkpoint=found)


KINDS = {"lightning": (lightning.ResilientCallback, lit), "transformers": (transformers.ResilientCallback, trained)}
RESUMING = {"lightning": "ckpt_path", "transformers": "resume_from_checkpoint"}


@pytest.fixture(params=KINDS)
def library(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One of the libraries, with the settings of a task of mizzen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIZZEN_CHECKPOINT_URI", "ckpt")
    monkeypatch.setenv("MIZZEN_CHECKPOINT_INTERVAL_S", "0")
    ENDED.clear()
    yield str(request.param)
    gc.collect()  # Otherwise iterators of these trainings would be found by the next one.


def told(action: Callable[[], object]) -> list[str]:
    """Returns the warnings about checkpoints."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        action()
    return [str(one.message) for one in found if issubclass(one.category, CheckpointWarning)]


def test_two_trainings_of_a_process_have_two_roots(library: str) -> None:
    """The second one would load the end of the first one, such as another fold, and train nothing."""
    kind, train = KINDS[library]
    first = kind()
    assert not told(lambda: train(first, first.latest()))
    for second in (first, kind()):
        with pytest.raises(ValueError, match=r"ckpt: a training of this process has ended there.*/ckpt/2'"):
            second.latest()
        with pytest.raises(ValueError, match="a training of this process has ended there"):
            train(second, None)
    other = kind("ckpt/2")
    assert not told(lambda: train(other, other.latest()))


def test_a_training_that_does_not_load_is_told(library: str) -> None:
    """It warns before its first save. If a checkpoint was loaded and not given to the library, it is an error."""
    kind, train = KINDS[library]
    resilient = kind()
    (message,) = told(lambda: train(resilient, None))
    assert message.startswith(f"a restart would train from the beginning, without {RESUMING[library]}=resilient.latest")
    ENDED.clear()
    resilient = kind()
    assert resilient.latest()
    with pytest.raises(ValueError, match=f"of step 6 was loaded, but .* step 0: give {RESUMING[library]}="):
        train(resilient, None)
