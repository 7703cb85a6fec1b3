"""The place in the data where transformers' Trainer resumes, which it derives from the number of steps alone.

It takes the quotient and the remainder of the steps and the steps of an epoch as epoch and position. This is wrong if
epochs end early: a stream has no length, so the Trainer takes `max_steps` for an epoch, and begins the stream again
when it ends before; or a callback ends an epoch. The Trainer is then given another number of steps, from which it
derives the right place, and the true number afterwards.
"""

import json
import math
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments

from mizzen.checkpoint import CheckpointWarning

STATE = "trainer_state.json"


def steps_of_epoch(loader: Any, args: TrainingArguments, state: TrainerState) -> int:
    """Return the number of steps that the Trainer takes for an epoch."""
    try:
        batches = len(loader)
    except TypeError:
        return int(state.max_steps)
    return max(math.ceil(batches / int(args.gradient_accumulation_steps)), 1)


def change_state(folder: Path, **values: Any) -> None:
    """Change values in the state of a checkpoint of the Trainer. A state that cannot be read is not changed."""
    path = folder / STATE
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return  # `lacks` rejects such a checkpoint.
    path.write_text(json.dumps(state | values, indent=2, sort_keys=True) + "\n")


def set_true_step(state: TrainerState, step: int) -> None:
    """Set the number of steps, also in the Trainer's sums for its logs, after the Trainer has found its place."""
    state.global_step = step
    if (found := trainer_of(state)) is not None:
        found._initial_global_step = found._globalstep_last_logged = step


def trainer_of(state: TrainerState) -> Trainer | None:
    """Return the Trainer that has called a callback with `state`; it does not pass itself to callbacks."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and found.state is state:
            return found
        frame = frame.f_back
    return None


def check_length(saved: int, now: int) -> None:
    """Issue a `CheckpointWarning` if the steps of an epoch have changed, so that the Trainer's place is wrong."""
    if saved != now:
        message = (
            f"an epoch of the Trainer has {now} steps, but {saved} when the checkpoint was saved (for a stream, "
            "max_steps): the training resumes at another place in the data"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=3)
