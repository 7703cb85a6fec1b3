"""Integration with the Trainer of Hugging Face's transformers.

    resilient = ResilientCallback()
    trainer = Trainer(model, args, train_dataset=data, callbacks=[resilient])
    trainer.train(resume_from_checkpoint=resilient.latest())

When a save is due, the Trainer writes its own checkpoint to a private folder below its output folder. A `Checkpointer`
stores this folder, which is then removed. With `save_strategy="no"`, only this callback saves; with another strategy,
the Trainer's own checkpoints are not changed. If the Trainer keeps a best model, it is stored too.
"""

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, rotate_checkpoints

from mizzen import report
from mizzen.checkpoint import Checkpointer
from mizzen.checkpoint.attributes import ATTRIBUTES, ChangedAttributes
from mizzen.checkpoint.departure import StepAction
from mizzen.integrations import ddp
from mizzen.integrations.fetches import Fetches, steps_counted
from mizzen.integrations.files import FileCheckpoints, Loaded
from mizzen.integrations.held_states import HELD, load_states, states_of
from mizzen.integrations.renamed_weights import load_renamed_weights
from mizzen.integrations.trainer_position import STATE, change_state, set_true_step, steps_of_epoch
from mizzen.integrations.trainer_state import held, loss_since_log, set_loss_since_log, with_attributes

PRIVATE = ".mizzen"
"""The private folder below the output folder. The Trainer's rotation of checkpoints ignores it."""

_BEST = "best_model"
_STOPS = "stops"
_LOSS = "loss_since_log"
_FETCHES = "mizzen_fetches_{rank}.safetensors"
_NEEDED = {
    "a model": ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp*", "global_step*"),
    "an optimizer": ("optimizer*", "global_step*"),
    "a scheduler": ("scheduler.pt", "global_step*"),
    "the random generators": ("rng_state*.pth",),
}
"""Data that the Trainer needs to resume, with patterns of the file names (`global_step*`: DeepSpeed's folders)."""


def lacks(folder: Path) -> str | None:
    """Return what `folder` lacks for the Trainer to resume from it; None if it is complete.

    The best model is not checked, because the Trainer can resume without it.
    """
    try:
        state = json.loads((folder / STATE).read_bytes())
    except FileNotFoundError:
        return STATE
    except ValueError:
        return f"a {STATE} that is JSON"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return f"global_step in {STATE}"
    for what, names in _NEEDED.items():
        if not any(path.is_dir() or path.stat().st_size for name in names for path in folder.glob(name)):
            return what
    return None


@dataclass
class _Save:
    """A save that this callback has requested from the Trainer."""

    action: StepAction
    own: bool
    """Whether the Trainer saves at this step by its own strategy. Then it saves to its usual folder."""
    best_before: str | None
    changed: dict[str, Any] = field(default_factory=dict)
    """The original values of the Trainer's arguments that are changed during the save."""


class ResilientCallback(TrainerCallback):
    """Saves when a save is due or a notice arrives, and exits with code 143 after a notice.

    In a gang, all ranks agree on the action at each step. Rank 0 stores the files. It also stores the files of other
    ranks (their random generators) if all ranks write to the same output folder. This must be the last callback of the
    Trainer: if a later callback requests a save at the same step, that checkpoint is stored only here.
    """

    def __init__(self, checkpointer: Checkpointer | str | os.PathLike[str] | None = None) -> None:
        """Use `checkpointer`, which must not be sharded, or the one of a root: `ddp.checkpointer(root, sharded=False)`.

        Each training of a process needs its own root.
        """
        self._given = checkpointer
        self._files: FileCheckpoints | None = None
        self._loaded: Loaded | None = None
        self._best: tuple[str, Path] | None = None
        self._save: _Save | None = None
        self._fetches: Fetches | None = None
        self._attributes = ChangedAttributes()
        self._attributes_within: dict[str, Any] = {}
        """Attributes from a checkpoint that was saved within an epoch, if the training resumes in this epoch."""
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The groups of the optimizer, with their loaded content, if the training resumes within an epoch."""
        self._evaluates = False
        """Whether the script wants an evaluation before the first step."""
        self._stops = False
        """Whether a callback had stopped the training at the checkpoint."""
        self._settled = -1
        """The last step for which the action was decided."""

    @property
    def files(self) -> FileCheckpoints:
        """The `FileCheckpoints`, created on first use because the process group may not exist earlier."""
        if self._files is None:
            given = self._given
            made = given if isinstance(given, Checkpointer) else ddp.checkpointer(given, sharded=False)
            self._files = FileCheckpoints(made, ddp.agreement(), lacks)
        return self._files

    def latest(self) -> str | None:
        """Load the newest valid checkpoint. Return its folder, for `resume_from_checkpoint`; None if there is none.

        The folder is temporary and is removed after the first step.

        Raises:
            ValueError, CheckpointError: as for `FileCheckpoints.load`.
        """
        self._loaded = self.files.load()
        if self._loaded is None:
            return None
        self._best = _best_of(self._loaded)
        if self._best is not None:
            # The Trainer drops the best model if its folder does not exist.
            change_state(self._loaded.folder, best_model_checkpoint=str(self._best[1]))
        counted = steps_counted(self._loaded.folder / _FETCHES.format(rank=0))
        if counted is not None:
            change_state(self._loaded.folder, global_step=counted)
        return str(self._loaded.folder)

    def _follow(self, args: TrainingArguments, state: TrainerState, loader: Any) -> Fetches:
        """Return the tracker of the Trainer's fetches, with the loaded states of the resumed epoch."""
        length = steps_of_epoch(loader, args, state)
        fetches = Fetches(args.seed if args.data_seed is None else args.data_seed, args.process_index)
        fetches.count(args.gradient_accumulation_steps, length, state.global_step // length)
        if self._loaded is not None and state.global_step:
            set_true_step(state, self._loaded.step)
        if self._loaded is not None and not args.ignore_data_skip:
            saved = self._loaded.folder / _FETCHES.format(rank=args.process_index)
            if saved.exists() and fetches.load(saved):
                # Within an epoch, the Trainer would restore the generators after it has fetched a batch.
                own = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
                (self._loaded.folder / own).unlink(missing_ok=True)
        fetches.install()
        return fetches

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove incomplete files of a killed process, and restore the best model to the Trainer's output folder.

        Raises:
            ValueError: the Trainer saves only the model, from which a training cannot resume; or it runs a
                hyperparameter search, whose trials would share one checkpoint; or as for `FileCheckpoints.begin`.
        """
        del control
        if args.save_only_model:
            raise ValueError("save_only_model=True: a training cannot resume from the model alone; set it to False")
        if state.is_hyper_param_search:
            raise ValueError(
                "hyperparameter_search: its trials would share one checkpoint; run each trial as a separate job"
            )
        self.files.begin(self._loaded, state.global_step, "resume_from_checkpoint")
        self._save = None
        self._fetches = self._follow(args, state, kwargs.get("train_dataloader"))
        self._attributes.begin(with_attributes(state, kwargs))
        if self._loaded is not None and state.global_step:
            saved = self._loaded.state.get(ATTRIBUTES, {})
            load_renamed_weights(kwargs.get("model"), self._loaded.folder)
            set_loss_since_log(state, self._loaded.state.get(_LOSS, {}))
            if args.eval_on_start:  # Before the first step only.
                args.eval_on_start, self._evaluates = False, True
            load_states(held(state), self._loaded.state.get(HELD, {}))
            self._attributes.restore(saved)
            self._stops = bool(self._loaded.state.get(_STOPS))
            self._attributes_within = {} if self._is_between(state) and not self._stops else saved
            groups = kwargs["optimizer"].param_groups if kwargs.get("optimizer") and not self._is_between(state) else ()
            self._groups = [(group, dict(group)) for group in groups]
        private = Path(args.output_dir) / PRIVATE
        if state.is_world_process_zero:
            shutil.rmtree(private, ignore_errors=True)
        best, self._best = self._best, None
        if best is None or state.best_model_checkpoint != str(best[1]):
            return
        name, stored = best
        target = Path(args.output_dir) / name
        if state.is_world_process_zero:
            shutil.copytree(stored, private / name, ignore=shutil.ignore_patterns(_BEST))
            change_state(private / name, best_model_checkpoint=str(target))
            shutil.rmtree(target, ignore_errors=True)
            (private / name).rename(target)
        self.files.meet()
        state.best_model_checkpoint = str(target)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Track the iterator that the Trainer creates next. What other callbacks have set again is put back."""
        del args, control
        self._attributes.restore(self._attributes_within)
        while self._groups:
            group, loaded = self._groups.pop()
            group.update(loaded)
        if not self._stops:
            self._attributes_within = {}
        if self._fetches is not None:
            loader = kwargs.get("train_dataloader")
            # The Trainer would train one more step if it resumed after the last one.
            complete = self._stops or state.global_step >= state.max_steps
            self._fetches.begin(getattr(loader, "collate_fn", None), nothing=complete)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Request a save if one is due. After a notice, request a last save or exit."""
        del kwargs
        self._put_back(args)
        if self._fetches is not None:
            self._fetches.use()
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        # If the Trainer resumed from a checkpoint between an epoch's last step and its end, it would skip the
        # evaluation at the end of the epoch. So the last step is handled in `on_epoch_end`.
        if not (control.should_epoch_stop or (state.epoch is not None and float(state.epoch).is_integer())):
            self._commit(args, state, control)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Like `on_step_end`, for the last step of an epoch."""
        del kwargs
        self._put_back(args)
        if self._fetches is not None:
            self._fetches.end()
        if self._stops:
            control.should_training_stop = True
            if self._is_between(state):
                # The Trainer has begun another epoch, without a batch. What it does at its end was done before.
                self._attributes.restore(self._attributes_within)
                control.should_evaluate = control.should_log = control.should_save = False
            return control
        if state.global_step >= state.max_steps:
            control.should_training_stop = True
        self._commit(args, state, control)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the metrics that the Trainer logs, such as the loss."""
        del args, control, kwargs
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        report.progress(state.global_step, **numbers)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Redirect the save, which follows this evaluation."""
        del state, control, kwargs
        self._redirect(args)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Store the checkpoint that the Trainer has just written, if this callback requested it."""
        del kwargs
        save = self._save
        if save is None:
            return
        name = f"checkpoint-{state.global_step}"
        folder = Path(args.output_dir) / name
        self._put_back(args)
        fetches = folder / _FETCHES.format(rank=args.process_index)
        if self._fetches is not None:
            self._fetches.save(fetches)
        # Rank 0 may arrive here before the other ranks have written their files.
        self.files.meet()
        if not save.own:
            state.best_model_checkpoint = save.best_before
        if state.is_world_process_zero:
            if not save.own:
                change_state(folder, best_model_checkpoint=save.best_before)
            stops = control.should_training_stop and state.global_step < state.max_steps
            extra = {ATTRIBUTES: self._attributes.changed(), _STOPS: stops, HELD: states_of(held(state))}
            extra[_LOSS] = loss_since_log(state)
            self.files.save(state.global_step, folder, extra, _beside(args, state, folder))
        self.files.meet()
        if not save.own:
            if state.is_local_process_zero:
                shutil.rmtree(folder, ignore_errors=True)
        else:
            fetches.unlink(missing_ok=True)
        if save.own and state.is_world_process_zero:
            rotate_checkpoints(
                output_dir=args.output_dir,
                save_total_limit=args.save_total_limit,
                best_model_checkpoint=state.best_model_checkpoint,
                use_mtime=True,
            )
        if save.action is StepAction.FLUSH:
            self.files.leave()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the Trainer's arguments, and remove the private folder."""
        del control, kwargs
        self.files.end()
        self._put_back(args)
        args.eval_on_start |= self._evaluates
        if self._fetches is not None:
            self._fetches.remove()
        if state.is_world_process_zero:
            shutil.rmtree(Path(args.output_dir) / PRIVATE, ignore_errors=True)

    def _is_between(self, state: TrainerState) -> bool:
        """Return whether the training is between two epochs."""
        return float(state.epoch or 0).is_integer()

    def _commit(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if self._settled == state.global_step:
            return
        self._settled = state.global_step
        action = self.files.action(state.global_step)
        if action is StepAction.LEAVE:
            self.files.leave()
        if action is StepAction.NOTHING:
            self._attributes.look()
            return
        if action is StepAction.FLUSH:
            # After a notice there is no time to evaluate or log.
            control.should_evaluate = control.should_log = False
        elif control.should_evaluate and args.save_strategy == SaveStrategy.BEST:
            # The Trainer decides by the evaluation whether to save now. Our save remains due at the next step.
            return
        self._save = _Save(action, control.should_save, state.best_model_checkpoint)
        control.should_save = True
        if not control.should_evaluate:
            self._redirect(args)

    def _redirect(self, args: TrainingArguments) -> None:
        """Direct the next save to the private folder. If it is the Trainer's own save, only suspend the rotation."""
        save = self._save
        if save is None or save.changed:
            return
        told: dict[str, Any] = {"save_total_limit": None}
        if not save.own:
            told |= {"output_dir": str(Path(args.output_dir) / PRIVATE), "push_to_hub": False}
        save.changed = {name: getattr(args, name) for name in told}
        for name, value in told.items():
            setattr(args, name, value)

    def _put_back(self, args: TrainingArguments) -> None:
        """Restore the user's values of the Trainer's arguments."""
        save, self._save = self._save, None
        if save is not None:
            for name, value in save.changed.items():
                setattr(args, name, value)


def _beside(args: TrainingArguments, state: TrainerState, folder: Path) -> dict[str, Path]:
    """Return the best model's folder if the Trainer loads it at its end. It is omitted if it is `folder` itself."""
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return {}
    best = Path(state.best_model_checkpoint)
    return {f"{_BEST}/{best.name}": best} if best.is_dir() and not best.samefile(folder) else {}


def _best_of(loaded: Loaded) -> tuple[str, Path] | None:
    """Return the name and path of the best model's folder: stored with the checkpoint, or the checkpoint itself."""
    for beside in (loaded.folder / _BEST).glob("*"):
        return beside.name, beside
    best = json.loads((loaded.folder / STATE).read_bytes()).get("best_model_checkpoint")
    name = f"checkpoint-{loaded.step}"
    return (name, loaded.folder) if best is not None and Path(best).name == name else None
