"""The Trainer of Lightning.

    resilient = ResilientCallback()
    trainer = Trainer(callbacks=[resilient], enable_checkpointing=False)
    trainer.fit(model, ResumableLoader(data, batch_size=32, shuffle=True), ckpt_path=resilient.latest())

When a save is due Lightning writes its own checkpoint, which is then stored by a `Checkpointer` together with the
random generators, which Lightning leaves out. The position in the data is in it if the loader has a state, as a
`ResumableLoader` has (several processes: `Trainer(use_distributed_sampler=False)`).
"""

import os
import pickle
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import StochasticWeightAveraging

from mizzen.checkpoint import Checkpointer, rng
from mizzen.checkpoint.pressure import StepAction
from mizzen.integrations import ddp
from mizzen.integrations.files import FileCheckpoints, Loaded

_FILE = "lightning.ckpt"
_RNG = "rng"
_NEEDED = ("state_dict", "optimizer_states", "loops")
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def lacks(folder: Path) -> str | None:
    """What a folder lacks that Lightning needs to go on from it; None if nothing."""
    path = folder / _FILE
    if path.is_dir():  # Some strategies write one.
        return None if any(path.iterdir()) else f"any file in {_FILE}"
    if not path.exists():
        return _FILE
    try:
        # Tensors stay in the file.
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        return f"a {_FILE} that can be loaded: {error}"
    return next((f"{name} in {_FILE}" for name in _NEEDED if name not in found), None)


def _go_on_averaging(trainer: Trainer, pl_module: LightningModule) -> None:
    """Let `StochasticWeightAveraging` take its schedule over again where an epoch goes on.

    It does so at the start of an epoch, which Lightning leaves out then. What it averages is not averaged twice.
    """
    loop = trainer.fit_loop
    if not (loop.restarted_mid_epoch or loop.restarted_on_epoch_end or loop.resumed_on_epoch_end):
        return
    for callback in trainer.callbacks:
        averages = isinstance(callback, StochasticWeightAveraging)
        if averages and callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            callback.on_train_epoch_start(trainer, pl_module)


class ResilientCallback(Callback):
    """Saves when it is due or a notice comes, and ends the process with code 143 after a notice.

    In a gang all ranks agree at each step, and rank 0 stores the files.
    """

    def __init__(self, checkpointer: Checkpointer | None = None) -> None:
        """`checkpointer`: one that is not sharded; by default made from the environment."""
        # Lightning makes the process group later, but the rank is known already, as Lightning knows it.
        rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
        world_size = max(rank + 1, int(os.environ.get("WORLD_SIZE", "1")))
        made = checkpointer or Checkpointer(rank=rank, world_size=world_size)
        self.files = FileCheckpoints(made, lambda number: number, lacks)
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._loaded: Loaded | None = None
        self._step = 0

    def latest(self) -> str | None:
        """The newest valid checkpoint, for `ckpt_path`; None if there is none yet.

        It is a temporary file, and removed after the first step.

        Raises:
            CheckpointError: as `Checkpointer.load_latest`.
        """
        self._loaded = self.files.load()
        return None if self._loaded is None else str(self._loaded.folder / _FILE)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take notices over from Lightning, and set the random generators last: loading drew from them."""
        self.files.agree = ddp.agreement()
        # Lightning's own handler waits for all ranks where only one may have been told, and stops in a validation,
        # where nothing can be saved.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._step = trainer.global_step
        _go_on_averaging(trainer, pl_module)
        if self._loaded is not None:
            rng.restore_shared(self._loaded.state[_RNG])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is due; after a notice save a last time if that fits, and leave."""
        del pl_module, outputs, batch, batch_idx
        # Between two batches of one step there are gradients, which are in no checkpoint.
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        # From a checkpoint that was made here after an epoch's last batch Lightning counts wrong; after the epoch's
        # end it does not.
        if not trainer.is_last_batch:
            self._act(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What `on_train_batch_end` does, for the last batch of an epoch."""
        del pl_module
        if trainer.is_last_batch:
            self._act(trainer)

    def _act(self, trainer: Trainer) -> None:
        action = self.files.action(self._step)
        if action in (StepAction.SAVE, StepAction.FLUSH):
            with tempfile.TemporaryDirectory(prefix="mizzen-") as folder:
                trainer.save_checkpoint(Path(folder) / _FILE)
                self.files.save(self._step, Path(folder), {_RNG: rng.capture_shared()})
        if action in (StepAction.FLUSH, StepAction.LEAVE):
            self.files.leave()
