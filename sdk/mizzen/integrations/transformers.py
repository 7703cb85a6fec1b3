"""The Trainer of Hugging Face's transformers.

    resilient = ResilientCallback()
    trainer = Trainer(model, args, train_dataset=data, callbacks=[resilient])
    trainer.train(resume_from_checkpoint=resilient.latest())

When a save is due the Trainer writes its own checkpoint to a private folder below its output folder, which is then
stored by a `Checkpointer` and removed. `save_strategy="no"` leaves all saving to this callback; what the Trainer saves
by a strategy of its own is left alone. The best model so far, where the Trainer keeps one, is stored too.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, rotate_checkpoints

from mizzen.checkpoint import Checkpointer
from mizzen.checkpoint.pressure import StepAction
from mizzen.integrations import ddp
from mizzen.integrations.files import FileCheckpoints, Loaded

PRIVATE = ".mizzen"
"""A folder below the output folder, out of sight of the Trainer's rotation."""

_STATE = "trainer_state.json"
_BEST = "best_model"
_NEEDED = {
    "a model": ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp*", "global_step*"),
    "an optimizer": ("optimizer*", "global_step*"),
    "a scheduler": ("scheduler.pt", "global_step*"),
    "the random generators": ("rng_state*.pth",),
}
"""What the Trainer needs to go on, and how its files are called (`global_step*`: DeepSpeed's folders)."""


def lacks(folder: Path) -> str | None:
    """What a folder lacks that the Trainer needs to go on from it; None if nothing.

    What it needs for the best model so far is not asked: the Trainer goes on without.
    """
    try:
        state = json.loads((folder / _STATE).read_bytes())
    except FileNotFoundError:
        return _STATE
    except ValueError:
        return f"a {_STATE} that is JSON"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return f"global_step in {_STATE}"
    for what, names in _NEEDED.items():
        if not any(path.is_dir() or path.stat().st_size for name in names for path in folder.glob(name)):
            return what
    return None


@dataclass
class _Save:
    """A save that the Trainer was asked for."""

    action: StepAction
    own: bool
    """Whether the Trainer would have saved at this step by itself: then it does, where it always does."""
    best_before: str | None
    changed: dict[str, Any] = field(default_factory=dict)
    """The Trainer's arguments as they were, for the time of the save."""


class ResilientCallback(TrainerCallback):
    """Saves when it is due or a notice comes, and ends the process with code 143 after a notice.

    In a gang all ranks agree at each step. Rank 0 stores the files, those of the other ranks (their random generators)
    as well if they are written to the same output folder. It should be the last of the Trainer's callbacks: what one
    after it asks the Trainer to save is stored here only.
    """

    def __init__(self, checkpointer: Checkpointer | None = None) -> None:
        """`checkpointer`: one that is not sharded; by default `ddp.checkpointer(sharded=False)`."""
        self._given = checkpointer
        self._files: FileCheckpoints | None = None
        self._loaded: Loaded | None = None
        self._best: tuple[str, Path] | None = None
        self._save: _Save | None = None
        self._settled = -1
        """The last step at which it was decided what to do."""

    @property
    def files(self) -> FileCheckpoints:
        """Made when it is first needed: the process group may not be there before."""
        if self._files is None:
            self._files = FileCheckpoints(self._given or ddp.checkpointer(sharded=False), ddp.agreement(), lacks)
        return self._files

    def latest(self) -> str | None:
        """The folder of the newest valid checkpoint, for `resume_from_checkpoint`; None if there is none yet.

        It is a temporary one, and removed after the first step.

        Raises:
            CheckpointError: as `Checkpointer.load_latest`.
        """
        self._loaded = self.files.load()
        if self._loaded is None:
            return None
        self._best = _best_of(self._loaded)
        if self._best is not None:
            # The Trainer forgets a best model whose folder it does not find.
            _set_best(self._loaded.folder, str(self._best[1]))
        return str(self._loaded.folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove what a killed process left half written, and put the best model where the Trainer keeps it.

        Raises:
            ValueError: the Trainer would save the model only, with which nothing can go on, or would run many
                trainings under the checkpoints of one.
        """
        del control, kwargs
        if args.save_only_model:
            raise ValueError("save_only_model=True: a training cannot go on from the model alone; leave it False")
        if state.is_hyper_param_search:
            raise ValueError(
                "hyperparameter_search: its trials would share one checkpoint; run each as a job of its own"
            )
        self._save = None
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
            _set_best(private / name, str(target))
            shutil.rmtree(target, ignore_errors=True)
            (private / name).rename(target)
        self.files.meet()
        state.best_model_checkpoint = str(target)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for a save if one is due; after a notice leave, or ask for a last one."""
        del kwargs
        self._put_back(args)
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        # From a checkpoint between an epoch's last step and its end the Trainer would go on behind that end, without
        # the evaluation there.
        if state.epoch is None or not float(state.epoch).is_integer():
            self._settle(args, state, control)
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """What `on_step_end` does, for the last step of an epoch."""
        del kwargs
        self._put_back(args)
        self._settle(args, state, control)
        return control

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The evaluation before a save is over: the save comes next."""
        del state, control, kwargs
        self._redirect(args)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Store what the Trainer has just written, if it was asked to."""
        del control, kwargs
        save = self._save
        if save is None:
            return
        name = f"checkpoint-{state.global_step}"
        folder = Path(args.output_dir) / name
        self._put_back(args)
        # Rank 0 may be here before the others have written theirs.
        self.files.meet()
        if not save.own:
            state.best_model_checkpoint = save.best_before
        if state.is_world_process_zero:
            if not save.own:
                _set_best(folder, save.best_before)
            self.files.save(state.global_step, folder, beside=_beside(args, state, folder))
        self.files.meet()
        if not save.own:
            if state.is_local_process_zero:
                shutil.rmtree(folder, ignore_errors=True)
        elif state.is_world_process_zero:
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
        """Leave the Trainer's arguments as they were, and no folder."""
        del control, kwargs
        self._put_back(args)
        if state.is_world_process_zero:
            shutil.rmtree(Path(args.output_dir) / PRIVATE, ignore_errors=True)

    def _settle(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if self._settled == state.global_step:
            return
        self._settled = state.global_step
        action = self.files.action(state.global_step)
        if action is StepAction.LEAVE:
            self.files.leave()
        if action is StepAction.NOTHING:
            return
        if action is StepAction.FLUSH:
            # There is no time for either.
            control.should_evaluate = control.should_log = False
        elif control.should_evaluate and args.save_strategy == SaveStrategy.BEST:
            # The Trainer decides about this save itself, by the result. Ours stays due, at the next step.
            return
        self._save = _Save(action, control.should_save, state.best_model_checkpoint)
        control.should_save = True
        if not control.should_evaluate:
            self._redirect(args)

    def _redirect(self, args: TrainingArguments) -> None:
        """Have the next save go to the private folder, or, if it is the Trainer's own, be kept until it is stored."""
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
        """The Trainer's arguments as its user gave them."""
        save, self._save = self._save, None
        if save is not None:
            for name, value in save.changed.items():
                setattr(args, name, value)


def _beside(args: TrainingArguments, state: TrainerState, folder: Path) -> dict[str, Path]:
    """The best model's folder, if the Trainer is to load it at its end; none if it is `folder`, which is stored."""
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return {}
    best = Path(state.best_model_checkpoint)
    return {f"{_BEST}/{best.name}": best} if best.is_dir() and not best.samefile(folder) else {}


def _best_of(loaded: Loaded) -> tuple[str, Path] | None:
    """The name of the best model's folder, and where it is: stored with a checkpoint, or the checkpoint itself."""
    for beside in (loaded.folder / _BEST).glob("*"):
        return beside.name, beside
    best = json.loads((loaded.folder / _STATE).read_bytes()).get("best_model_checkpoint")
    name = f"checkpoint-{loaded.step}"
    return (name, loaded.folder) if best is not None and Path(best).name == name else None


def _set_best(folder: Path, best: str | None) -> None:
    """Name the best model's folder in a checkpoint of the Trainer."""
    path = folder / _STATE
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return  # It is refused for that.
    path.write_text(json.dumps({**state, "best_model_checkpoint": best}, indent=2, sort_keys=True) + "\n")
