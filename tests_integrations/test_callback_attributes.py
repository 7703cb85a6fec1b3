"""Plain attributes of the callbacks and Trainers of Lightning and transformers."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from mizzen import Checkpointer
from mizzen.checkpoint import CheckpointWarning
from mizzen.integrations.files import ENDED
from mizzen.integrations.lightning import ResilientCallback
from mizzen.integrations.torch import ResumableLoader
from mizzen.integrations.transformers import ResilientCallback as HuggingFaceCallback


class Count(L.Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = self._batches = 0

    def on_train_batch_start(self, *_: Any) -> None:
        """Count."""
        self.batches += 1
        self._batches += 1


class Other(L.Callback):
    """Has an attribute of the same name."""

    def __init__(self) -> None:
        self.batches = -1


class Lit(L.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self._seen = nn.Linear(1, 1), 0

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        self._seen += 1
        return self.line(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.1)


class Slow(Lit):
    """Accumulates the gradients of one of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.automatic_optimization = nn.Linear(1, 1), False

    def training_step(self, batch: Any, number: int) -> None:
        """Step one optimizer."""
        slow, fast = self.optimizers()
        fast.zero_grad()
        self.manual_backward(self.line(batch[0]).sum() + self.other(batch[0]).sum())
        fast.step()
        if number % 3 == 2:
            slow.step()
            slow.zero_grad()

    def configure_optimizers(self) -> Any:
        """Return both optimizers."""
        return torch.optim.SGD(self.line.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_callback_gets_its_own_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the callback that was in its place in the list."""
    monkeypatch.chdir(tmp_path)

    def fit(epochs: int, *callbacks: L.Callback) -> Lit:
        ENDED.clear()  # As in a new process.
        resilient = ResilientCallback(Checkpointer(tmp_path / "root", interval_s=0))
        loader: DataLoader[Any] = ResumableLoader(TensorDataset(torch.ones(6, 1)), batch_size=2)
        module = Lit()
        L.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*callbacks, resilient],
        ).fit(module, loader, ckpt_path=resilient.latest())  # fmt: skip
        return module

    fit(1, Count())
    count, other = Count(), Other()
    module = fit(2, other, count)
    assert (other.batches, count.batches) == (-1, 6)
    # Private ones of the script, not those of Lightning.
    assert (count._batches, module._seen) == (6, 6)


class Patience(TrainerCallback):
    """Has no state of its own."""

    def __init__(self) -> None:
        self._steps, self.best = 0, []
        self.epochs = [0, 0]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count."""
        self.epochs[0] += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count."""
        self.epochs[1] += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count."""
        self._steps += 1
        self.best.append(state.global_step)


class Smooth(Trainer):
    """Keeps an average of the loss."""

    _calls = 0

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        """Return the loss, and count."""
        self._calls += 1
        return super().compute_loss(model, inputs, *more, **options)


class Own(torch.optim.SGD):
    """Counts its steps."""

    _taken = 0

    def step(self, closure: Any = None) -> Any:
        """Count."""
        self._taken += 1
        return super().step(closure)


@pytest.mark.filterwarnings("ignore")
def test_attributes_of_callbacks_and_the_trainer_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the optimizer, and of a callback whose state the Trainer saves but does not load."""
    monkeypatch.chdir(tmp_path)
    found = []
    for steps in (3, 5):
        ENDED.clear()  # As in a new process.
        config = BertConfig(
            vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
        )  # fmt: skip
        model = BertForSequenceClassification(config)
        resilient = HuggingFaceCallback(Checkpointer(tmp_path / "root", interval_s=0))
        own, stopping = Patience(), EarlyStoppingCallback(early_stopping_patience=9)
        args = TrainingArguments(
            "out", max_steps=steps, per_device_train_batch_size=2, report_to="none", use_cpu=True, disable_tqdm=True,
            save_strategy="no", eval_strategy="steps", eval_steps=1, metric_for_best_model="loss",
        )  # fmt: skip
        rows = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": n % 2} for n in range(12)]
        optimizer = Own(model.parameters(), lr=0.0)
        trainer = Smooth(
            model, args, train_dataset=rows, eval_dataset=rows, callbacks=[own, stopping, resilient],
            optimizers=(optimizer, None),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resilient.latest())
        waited = stopping.early_stopping_patience_counter
        found.append((own._steps, own.best, trainer._calls, optimizer._taken, waited))
    # A validation has two batches, and the loss never becomes better than the first one.
    assert found == [(3, [1, 2, 3], 3 + 3 * 2, 3, 2), (5, [1, 2, 3, 4, 5], 5 + 5 * 2, 5, 4)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_a_training_that_a_callback_has_stopped_stays_so(
    strategy: str, best: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of a training that was killed after its last step neither trains nor evaluates. It has its weights."""
    monkeypatch.chdir(tmp_path)
    found, weights = [], []
    for _ in range(2):
        ENDED.clear()  # As in a new process.
        config = BertConfig(
            vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
        )  # fmt: skip
        resilient = HuggingFaceCallback(Checkpointer(tmp_path / "root", interval_s=0))
        own, stopping = Patience(), EarlyStoppingCallback(early_stopping_patience=1)
        args = TrainingArguments(
            "out", num_train_epochs=4, per_device_train_batch_size=4, report_to="none", use_cpu=True, disable_tqdm=True,
            save_strategy=strategy if best else "no", eval_strategy=strategy, eval_steps=2, save_steps=2,
            metric_for_best_model="same", greater_is_better=True, load_best_model_at_end=best, learning_rate=0.1,
        )  # fmt: skip
        rows = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": n % 2} for n in range(12)]
        trainer = Trainer(
            BertForSequenceClassification(config), args, train_dataset=rows, eval_dataset=rows,
            callbacks=[own, stopping, resilient], compute_metrics=lambda _: {"same": 1.0},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resilient.latest())
        evaluated = sum("eval_loss" in entry for entry in trainer.state.log_history)
        waited = stopping.early_stopping_patience_counter
        weights.append([one.tolist() for one in trainer.model.parameters()])
        found.append((trainer.state.global_step, own._steps, own.epochs, waited, evaluated))
    steps = 6 if strategy == "epoch" else 4
    assert found == [(steps, steps, [2, 2], 1, 2)] * 2
    assert weights[0] == weights[1]


@pytest.mark.filterwarnings("ignore")
def test_gradients_that_lightning_accumulates_over_a_checkpoint_are_told(tmp_path: Path) -> None:
    """An optimizer has stepped, so a checkpoint is saved, but another one has gradients."""
    resilient = ResilientCallback(Checkpointer(tmp_path / "ckpt", interval_s=0))
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[resilient], **options)
    with pytest.warns(CheckpointWarning, match="the training adds to gradients that were there at step"):
        trainer.fit(Slow(), ResumableLoader(TensorDataset(torch.ones(6, 1))), ckpt_path=resilient.latest())
