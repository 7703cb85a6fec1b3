"""Integration with the Trainer of Lightning.

    resilient = ResilientCallback()
    trainer = Trainer(callbacks=[resilient], enable_checkpointing=False)
    trainer.fit(model, ResumableLoader(data, batch_size=32, shuffle=True), ckpt_path=resilient.latest())

When a save is due, Lightning writes its own checkpoint. A `Checkpointer` then stores it, together with the states of
the random generators and the logged metrics, which Lightning does not save. The checkpoint contains the position in the
data if the loader has a `state_dict`, as a `ResumableLoader` has. With several processes, set
`Trainer(use_distributed_sampler=False)`.
"""

import os
import pickle
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import StochasticWeightAveraging
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import StochasticWeightAveraging

from mizzen import report
from mizzen.checkpoint import Checkpointer, CheckpointSettings, CheckpointWarning, rng
from mizzen.checkpoint.attributes import ATTRIBUTES, ChangedAttributes
from mizzen.checkpoint.departure import StepAction
from mizzen.checkpoint.gradients import FrozenParameters, GradientWatch
from mizzen.integrations import ddp
from mizzen.integrations.files import FileCheckpoints, Loaded
from mizzen.integrations.held_states import HELD, load_states, states_of
from mizzen.integrations.lightning_state import (
    LOADER,
    add_sums,
    held,
    loaders,
    logged,
    prune_again,
    pruned,
    saves_state,
    set_tuned,
    tuned,
    with_attributes,
)
from mizzen.integrations.torch import ResumableLoader

_FILE = "lightning.ckpt"
_RNG = "rng"
_LOGGED = "logged"
_STOPS = "stops"
_FROZEN = "frozen"
_TUNED = "tuned"
_PRUNED = "pruned"
_NEEDED = ("state_dict", "optimizer_states", "loops")
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def lacks(folder: Path) -> str | None:
    """Return what `folder` lacks for Lightning to resume from it; None if it is complete."""
    path = folder / _FILE
    if path.is_dir():  # Some strategies write a folder.
        return None if any(path.iterdir()) else f"any file in {_FILE}"
    if not path.exists():
        return _FILE
    try:
        # mmap: the tensors are not read into memory.
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        return f"a {_FILE} that can be loaded: {error}"
    return next((f"{name} in {_FILE}" for name in _NEEDED if name not in found), None)


def _after(loop: Any, method: str, call: Callable[[], object] | None) -> None:
    """Make a loop of Lightning call `call` at the end of one of its methods; None: restore the original method."""
    vars(loop).pop(method, None)
    plain = getattr(loop, method, None)  # The loop over batches has no `on_advance_start`.
    if plain is None:
        return

    def both(*arguments: Any) -> None:
        plain(*arguments)
        if call is not None:
            call()

    if call is not None:
        setattr(loop, method, both)


def _go_on(trainer: Trainer) -> None:
    """Make Lightning resume after the saved step; by itself it would repeat the validation, or end the next epoch.

    A step is saved after its validation, and an epoch's last step after all that belongs to the epoch.
    """
    fit, progress = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    steps = fit.epoch_loop
    if progress.ready == progress.processed:
        for loop in (fit, steps, steps.automatic_optimization, steps.manual_optimization, steps.val_loop):
            loop._restarting = False
        for loader in _resumable(trainer):
            loader.leave()
    positions = [(loader, loader.state_dict()) for loader in _resumable(trainer)]

    def begin() -> None:
        steps._restarting = False
        # Lightning has told the samplers its own epoch; a loader that is cycled has had more of them.
        for loader, position in positions if fit.restarted_mid_epoch else ():
            loader.load_state_dict(position)

    _after(steps, "on_run_start", begin)


def _go_on_averaging(trainer: Trainer, pl_module: LightningModule) -> None:
    """Let `StochasticWeightAveraging` set its learning-rate schedule again when training resumes within an epoch.

    It sets the schedule at the start of an epoch, in a hook that Lightning skips for a resumed epoch. The hook does not
    average the weights of an epoch a second time.
    """
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    for callback in trainer.callbacks:
        averages = isinstance(callback, StochasticWeightAveraging)
        if averages and callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            callback.on_train_epoch_start(trainer, pl_module)


def _begin_resumed_epoch(trainer: Trainer, saved: Path | None) -> None:
    """Call the hooks `on_train_epoch_start`, which Lightning skips if training resumes within an epoch.

    They set what no checkpoint contains, such as `self.noise = 0.1 * self.current_epoch`. What a checkpoint contains
    keeps its value: callbacks with a state are not called, and tensors of the module, learning rates and the random
    generators are put back. `saved`: Lightning's checkpoint.
    """
    module = trainer.lightning_module
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    versions = {name: tensor._version for name, tensor in tensors.items()}
    groups = [(group, dict(group)) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    generators = rng.capture_shared()
    module._current_fx_name = "on_train_epoch_start"
    for callback in trainer.callbacks:
        if not saves_state(callback) and not isinstance(callback, ResilientCallback):
            callback.on_train_epoch_start(trainer, module)
    module.on_train_epoch_start()
    module._current_fx_name = None
    rng.restore_shared(generators)
    for group, before in groups:
        group.update(before)
    changed = [name for name, tensor in tensors.items() if tensor._version != versions[name]]
    if changed and saved is not None and saved.is_file():
        state = torch.load(saved, map_location="cpu", mmap=True, weights_only=False)
        # Callbacks that average the weights save the average as the module's state.
        values = state.get("current_model_state", state["state_dict"])
        with torch.no_grad():
            for name in values.keys() & set(changed):
                tensors[name].copy_(values[name])


def _resumable(trainer: Trainer) -> list[ResumableLoader]:
    """Return the training's loaders that are of mizzen."""
    return [loader for loader in loaders(trainer) if isinstance(loader, ResumableLoader)]


def _load_positions(trainer: Trainer) -> None:
    """Load the loaders' positions if Lightning has not loaded them, because `estimated_stepping_batches` was used."""
    loop = trainer.fit_loop
    if loop._combined_loader is not None and getattr(loop, "_combined_loader_states_to_load", None):
        loop._combined_loader._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []


def _restore_generators(trainer: Trainer, state: Any) -> None:
    """Restore the random generators: now or, within an epoch, when a loader resumes its iteration."""
    held = rng.HeldGenerators(state)
    within = trainer.fit_loop.restarted_mid_epoch
    waiting = [loader.resume_generators(held) for loader in _resumable(trainer) if within]
    if not any(waiting):
        held()


class ResilientCallback(Callback):
    """Saves when a save is due or a notice arrives, and exits with code 143 after a notice.

    In a gang, all ranks agree on the action at each step, and rank 0 stores the files.
    """

    def __init__(self, checkpointer: Checkpointer | str | os.PathLike[str] | None = None) -> None:
        """Use `checkpointer`, which must not be sharded, or the one of a root. Default: that of the environment.

        Each training of a process needs its own root.
        """
        # Lightning creates the process group later. The rank is taken from the same variables as in Lightning.
        rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
        world_size = max(rank + 1, int(os.environ.get("WORLD_SIZE", "1")))
        made = checkpointer
        if not isinstance(made, Checkpointer):
            made = Checkpointer(made, settings=CheckpointSettings(rank=rank, world_size=world_size))
        self.files = FileCheckpoints(made, lambda number: number, lacks)
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._loaded: Loaded | None = None
        self._sums: dict[str, Any] = {}
        self._frozen = FrozenParameters()
        self._gradients = GradientWatch()
        self._attributes = ChangedAttributes()
        self._loaders: list[Any] = []
        """The loaders whose data `_attributes` have."""
        self._step = 0
        self._is_epoch_over = False

    def latest(self) -> str | None:
        """Load the newest valid checkpoint and return its path, for `ckpt_path`. Return None if there is none.

        The path is a temporary file, which is removed after the first step.

        Raises:
            ValueError, CheckpointError: as for `FileCheckpoints.load`.
        """
        self._loaded = self.files.load()
        return None if self._loaded is None else str(self._loaded.folder / _FILE)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set what was tuned at the first start. If it were tuned again, Lightning would forget the checkpoint."""
        del pl_module, stage
        if self._loaded is not None:
            set_tuned(trainer, self._loaded.state.get(_TUNED, {}))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare Lightning's loop: to restore what `on_train_start` changes, and to end a training again."""
        del pl_module
        fit = trainer.fit_loop
        _after(fit, "on_run_start", partial(self._restore_rest, trainer))
        _after(fit, "run", None)
        vars(fit)["run"] = partial(self._run, trainer, fit.run)

    def _run(self, trainer: Trainer, plain: Callable[[], None]) -> None:
        """Run the training. If it has taken its last step, call the hooks that follow: Lightning would not."""
        fit = trainer.fit_loop
        fit.setup_data()
        if self._loaded is None or not trainer.limit_train_batches or not fit.done:
            plain()
        else:
            fit.on_run_start()
            for one in trainer.callbacks:
                if isinstance(one, StochasticWeightAveraging):  # As its epoch for batch norms leaves them.
                    one._accumulate_grad_batches, one.momenta = trainer.accumulate_grad_batches, {}
            fit.on_run_end()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handler, and restore the position in the data and what was logged.

        Raises:
            ValueError: as for `FileCheckpoints.begin`.
        """
        self.files.begin(self._loaded, trainer.global_step, "ckpt_path")
        self.files.agree = ddp.agreement()
        # Lightning's own handler waits for all ranks, although only one may have received the signal. It also stops
        # during a validation, when no checkpoint can be saved.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._step = trainer.global_step
        # Lightning's hooks come before what follows them, such as a validation, callbacks that monitor a metric, or a
        # plateau schedule, which would be missing in a training that resumes from a checkpoint of a hook.
        _after(trainer.fit_loop.epoch_loop, "on_advance_end", partial(self._end_step, trainer))
        _after(trainer.fit_loop, "on_advance_end", partial(self._end_epoch, trainer))
        _after(trainer.fit_loop, "on_advance_start", partial(self._start_epoch, trainer))
        self._loaders = loaders(trainer)
        self._attributes.begin(with_attributes(trainer))
        self._frozen.begin({_FROZEN: pl_module})
        _go_on_averaging(trainer, pl_module)
        for loader in loaders(trainer):
            if not callable(getattr(loader, "load_state_dict", None)):
                message = (
                    f"the {type(loader).__name__} has no position, so a training that is killed within an epoch begins "
                    f"the epoch's data again; pass ResumableLoader(loader) of mizzen.integrations.torch to the Trainer"
                )
                warnings.warn(message, CheckpointWarning, stacklevel=2)
        if self._loaded is not None:
            _load_positions(trainer)
            _go_on(trainer)
            logged = self._loaded.state[_LOGGED]
            trainer.callback_metrics.update(logged["metrics"])
            self._sums = logged["sums"] if trainer.fit_loop.restarted_mid_epoch else {}
            # Lightning does not save that a callback, such as EarlyStopping, has stopped the training.
            trainer.should_stop = trainer.should_stop or self._loaded.state[_STOPS]
            self._frozen.change(_FROZEN, self._loaded.state.get(_FROZEN, {}))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the data position to the epoch's beginning: with `limit_train_batches` the last epoch ended early."""
        del pl_module
        for loader in _resumable(trainer):
            loader.set_epoch(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the metrics logged in this epoch before an interruption. Report metrics as often as they are logged."""
        del pl_module, outputs, batch, batch_idx
        add_sums(trainer, self._sums)
        self._sums = {}
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            report.progress(trainer.global_step, **trainer.callback_metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make Lightning step plateau schedules in a resumed epoch; by itself it lacks the metrics for that."""
        del pl_module
        trainer.fit_loop._restarting = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back Lightning's own methods, and remove the files of the checkpoint that was loaded."""
        del pl_module
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
            for method in ("on_advance_start", "on_advance_end", "on_run_start", "run"):
                _after(loop, method, None)
        self._close()
        self.files.end()

    def _start_epoch(self, trainer: Trainer) -> None:
        _after(trainer.fit_loop, "on_advance_start", None)  # Only the first epoch of a process is a resumed one.
        if trainer.fit_loop.restarted_mid_epoch:
            _begin_resumed_epoch(trainer, None if self._loaded is None else self._loaded.folder / _FILE)
            self._restore_attributes()

    def _restore_rest(self, trainer: Trainer) -> None:
        """Restore what the hooks `on_train_start` may have changed."""
        self._restore_attributes()
        if self._loaded is not None:
            prune_again(trainer, self._loaded.state.get(_PRUNED, {}))
            load_states(held(trainer), self._loaded.state.get(HELD, {}))
            _restore_generators(trainer, self._loaded.state[_RNG])

    def _close(self) -> None:
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _is_reloading(self, trainer: Trainer) -> bool:
        return self._is_epoch_over and trainer.reload_dataloaders_every_n_epochs > 0

    def _changed(self, trainer: Trainer) -> dict[str, Any]:
        """Return the attributes that have changed, without those of data that Lightning replaces."""
        changed = self._attributes.changed()
        if self._loaders == loaders(trainer) and not self._is_reloading(trainer):
            return changed
        return {
            kind: {path: one for path, one in ones.items() if not path.startswith(LOADER)}
            for kind, ones in changed.items()
        }

    def _restore_attributes(self) -> None:
        if self._loaded is not None:
            self._attributes.restore(self._loaded.state.get(ATTRIBUTES, {}))

    def _end_step(self, trainer: Trainer) -> None:
        # Within a step that accumulates several batches there are gradients, which no checkpoint contains.
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._close()
        fit = trainer.fit_loop
        # In an epoch that trains nothing (`StochasticWeightAveraging`), the callback has a state that is not saved.
        is_over = fit.epoch_loop._is_training_done or (trainer.should_stop and fit._can_stop_early)
        if not (is_over or getattr(fit, "_skip_backward", False)):
            self._act(trainer)

    def _end_epoch(self, trainer: Trainer) -> None:
        if any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks):
            # In its last epoch, which trains nothing, Lightning steps with the gradients that are left: no checkpoint
            # has them.
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        self._is_epoch_over = True
        self._act(trainer)
        self._is_epoch_over = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Drop the positions of loaders that Lightning creates again for the next epoch, with other data perhaps."""
        del pl_module
        if self._is_reloading(trainer):
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = []

    def _act(self, trainer: Trainer) -> None:
        """Save if a save is due. After a notice, save a last time if there is enough time, and exit."""
        action = self.files.action(self._step)
        if action in (StepAction.SAVE, StepAction.FLUSH):
            with tempfile.TemporaryDirectory(prefix="mizzen-") as folder:
                try:
                    trainer.save_checkpoint(Path(folder) / _FILE)
                except (OSError, RuntimeError) as error:  # For example, the disk of the temporary folder is full.
                    if trainer.world_size > 1:
                        raise  # The other ranks wait within `save_checkpoint`.
                    self.files.checkpointer.not_saved(self._step, error)
                else:
                    extra = {_RNG: rng.capture_shared(), _LOGGED: logged(trainer), _STOPS: trainer.should_stop}
                    extra |= {_FROZEN: self._frozen.changed(_FROZEN), ATTRIBUTES: self._changed(trainer)}
                    extra |= {_TUNED: tuned(trainer), HELD: states_of(held(trainer))}
                    extra[_PRUNED] = pruned(trainer)
                    self._gradients.captured(self._step, {"module": trainer.lightning_module})
                    self.files.save(self._step, Path(folder), extra)
        else:
            self._attributes.look()
        if action in (StepAction.FLUSH, StepAction.LEAVE):
            self.files.leave()
