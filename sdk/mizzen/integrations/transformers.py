"""The Trainer of Hugging Face's transformers.

    resilient = ResilientCallback()
    trainer = Trainer(model, args, train_dataset=data, callbacks=[resilient])
    trainer.train(resume_from_checkpoint=resilient.latest())

When a save is due the Trainer writes its own checkpoint, which is then stored by a `Checkpointer` and removed from
the output folder. `save_strategy="no"` leaves all saving to this callback; what the Trainer saves by a strategy of
its own is left alone.
"""

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mizzen.checkpoint import Checkpointer
from mizzen.checkpoint.pressure import Wish
from mizzen.integrations import ddp
from mizzen.integrations.files import MARK, FileCheckpoints, Loaded


class ResilientCallback(TrainerCallback):
    """Saves when it is due or a notice comes, and ends the process with code 143 after a notice.

    In a gang all ranks agree at each step. Rank 0 stores the files, those of the other ranks (their random generators)
    as well if they are written to the same output folder.
    """

    def __init__(self, checkpointer: Checkpointer | None = None) -> None:
        """`checkpointer`: one that is not sharded; by default `ddp.checkpointer(sharded=False)`."""
        self._given = checkpointer
        self._files: FileCheckpoints | None = None
        self._loaded: Loaded | None = None
        self._wish = Wish.NOTHING
        self._asked: Path | None = None

    @property
    def files(self) -> FileCheckpoints:
        """Made when it is first needed: the process group may not be there before."""
        if self._files is None:
            self._files = FileCheckpoints(self._given or ddp.checkpointer(sharded=False), ddp.agreement())
        return self._files

    def latest(self) -> str | None:
        """The folder of the newest valid checkpoint, for `resume_from_checkpoint`; None if there is none yet.

        It is a temporary one, and removed after the first step.

        Raises:
            CheckpointError: as `Checkpointer.load_latest`.
        """
        self._loaded = self.files.load()
        return None if self._loaded is None else str(self._loaded.folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove what a killed process left half written.

        Raises:
            ValueError: the Trainer would save the model only, with which nothing can go on.
        """
        del control, kwargs
        if args.save_only_model:
            raise ValueError("save_only_model=True: a training cannot go on from the model alone; leave it False")
        if state.is_world_process_zero:
            for mark in Path(args.output_dir).glob(f"checkpoint-*/{MARK}"):
                shutil.rmtree(mark.parent, ignore_errors=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for a save if one is due; after a notice leave, or ask for a last one."""
        del kwargs
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        self._wish = self.files.wish(state.global_step)
        if self._wish is Wish.LEAVE:
            self.files.leave()
        if self._wish is not Wish.NOTHING:
            self._asked = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if state.is_world_process_zero and not control.should_save and not self._asked.exists():
                self._asked.mkdir(parents=True)
                (self._asked / MARK).touch()
            control.should_save = True
        if self._wish is Wish.FLUSH:
            # There is no time for either.
            control.should_evaluate = control.should_log = False
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Store what the Trainer has just written, if it was asked to."""
        del args, control, kwargs
        folder, self._asked = self._asked, None
        if folder is None:
            return
        # Rank 0 may be here before the others have written theirs.
        self.files.meet()
        if state.is_world_process_zero:
            self.files.save(state.global_step, folder)
            if (folder / MARK).exists():
                shutil.rmtree(folder, ignore_errors=True)
        if self._wish is Wish.FLUSH:
            self.files.leave()
