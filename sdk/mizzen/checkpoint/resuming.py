"""`verify_resume`: whether a training that was saved and restored goes on as if nothing had happened, bit by bit.

    def make():
        model = build_model()
        optimizer = torch.optim.Adam(model.parameters())
        return {"model": model, "optimizer": optimizer, "batches": Batches()}

    def train_step(state):
        ...

    verify_resume(train_step, make, steps=5)

What a checkpoint misses shows only after a kill, as a result that is a little different. This finds it in a test, and
says which entry differs first.
"""

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

from mizzen.checkpoint import differences, parts, rng
from mizzen.checkpoint.errors import CheckpointError, StateError
from mizzen.checkpoint.looking import open_checkpoints
from mizzen.checkpoint.tracking import PROGRESS, RNG, Tracked
from mizzen.checkpoint.writing import Gang, Retention, open_writer
from mizzen.objects.files import FileStore

State: TypeAlias = Mapping[str, Any]


class ResumeError(CheckpointError):
    """A training that was resumed from its checkpoint is not the training that went on."""

    def __init__(self, message: str, path: str, step: int) -> None:
        super().__init__(message)
        self.path = path
        """The entry that differs first, such as `optimizer/state/0/exp_avg`."""
        self.step = step
        """After how many steps from the restore; 0: right after it."""


def verify_resume(
    train_step: Callable[[Any], object],
    state: State | Callable[[], State],
    *,
    steps: int = 3,
    before: int = 1,
) -> None:
    """Train, save, restore into a fresh copy, train both on, and compare all of their states after each step.

    The random generators that libraries share are set for each of the two before its step, and at the end are as they
    were before the call. The checkpoint is written to a temporary folder, and none is told to a scheduler.

    Args:
        train_step: does one step on the objects that it is given, and uses no other ones that change.
        state: a function that makes all objects new: a dict of what `Checkpointer.track` takes. Or such a dict, which
            is copied (`copy.deepcopy`) and not changed.
        steps: how many steps to compare, 1 or more.
        before: how many steps to train before the save. With 0 an optimizer has no state yet.

    Raises:
        ResumeError: an entry differs; the message says which one first, after which step and by how much.
        StateError: the state cannot be stored, tracked or copied.
        ValueError: a number is out of its range.
        TypeError: `train_step` does not take the objects.
    """
    for name, number, least in (("steps", steps, 1), ("before", before, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r}: must be a whole number, {least} or more")
    shared = rng.capture_shared()
    try:
        make = state if callable(state) else _copier(state)
        _verify(train_step, make, steps, before)
    finally:
        rng.restore_shared(shared)


def _verify(train_step: Callable[[Any], object], make: Callable[[], State], steps: int, before: int) -> None:
    straight = _Run("the training that goes on", train_step, make())
    for step in range(1, before + 1):
        straight.train(step)
    fresh = make()
    if shared := _shared(straight.objects, fresh):
        raise StateError(f"state: {shared!r} is the same object in both copies; the function must make all objects new")
    resumed = _Run("the training that is resumed", train_step, fresh)
    loaded = _through_a_checkpoint(before, straight.capture(before))
    resumed.restore(loaded)
    saved = copy.deepcopy(loaded)
    for step in range(steps + 1):
        if step:
            straight.train(before + step)
            resumed.train(before + step)
        left, right = straight.capture(before + step), resumed.capture(before + step)
        found = list(differences.between(left, right))
        if found:
            raise _error(found, step, stuck=step > 0 and _is_as_saved(saved, right) and not _is_as_saved(saved, left))


class _Run:
    """One of the two trainings, with its own states of the shared random generators."""

    def __init__(self, name: str, train_step: Callable[[Any], object], objects: State) -> None:
        self.name = name
        self.objects = objects
        self._train_step = train_step
        self._tracked = Tracked(objects)
        self._rng = rng.capture_shared()
        try:
            inspect.signature(train_step).bind(objects)
        except TypeError as error:
            raise TypeError(f"train_step must take the dict of objects, as in train_step(state): {error}") from None
        except ValueError:
            return  # A builtin does not say what it takes.

    def train(self, step: int) -> None:
        """Do one step, of this number."""
        rng.restore_shared(self._rng)
        try:
            self._train_step(self.objects)
        except Exception as error:
            error.add_note(f"in {self.name}, at step {step}")
            raise
        self._rng = rng.capture_shared()

    def capture(self, step: int) -> dict[str, Any]:
        """The state as a checkpoint would have it."""
        rng.restore_shared(self._rng)
        return self._tracked.capture(step)

    def restore(self, state: State) -> None:
        """Load a state."""
        self._tracked.restore(state)
        self._rng = rng.capture_shared()


def _through_a_checkpoint(step: int, state: State) -> dict[str, Any]:
    """The state as it comes back from a root."""
    encoded = {name: parts.encode(name, value) for name, value in state.items()}
    with tempfile.TemporaryDirectory(prefix="mizzen-") as folder:
        open_writer(FileStore(Path(folder)), 1, Gang(), Retention(1)).write(step, encoded)
        return open_checkpoints(folder).load(step, trusted=True).state


def _copier(state: State) -> Callable[[], State]:
    hint = "give a function that makes all objects new instead of the objects"
    for name, value in state.items():
        if isinstance(value, tuple) and any(isinstance(one, FunctionType) for one in value):
            raise StateError(f"state[{name!r}]: a pair of functions cannot be copied; {hint}")

    def make() -> State:
        try:
            # All at once: an optimizer's parameters must be those of the copied model.
            return copy.deepcopy(dict(state))
        except Exception as error:
            raise StateError(f"state: cannot be copied ({error}); {hint}") from error

    return make


def _shared(left: State, right: State) -> str | None:
    """The name of an object that both have."""
    return next((name for name in left if name in right and left[name] is right[name]), None)


def _is_as_saved(saved: State, now: State) -> bool:
    return not any(True for found in differences.between(saved, now) if found.path.split("/")[0] not in (RNG, PROGRESS))


def _error(found: list[differences.Difference], step: int, stuck: bool) -> ResumeError:
    first = found[0]
    when = "right after the restore" if not step else f"{step} step{'s' if step > 1 else ''} after the restore"
    message = f"the resumed training differs {when}, first at {first.path}: {first.how}"
    others = dict.fromkeys(one.path.split("/")[0] for one in found[1:])
    if len(found) > 1:
        message += f" (and {len(found) - 1} more, in {', '.join(others)})"
    if stuck:
        message += "; its state did not change at all: does train_step use the objects that it is given?"
    elif not step:
        message += "; what is saved of it does not come back: compare its state_dict and load_state_dict"
    else:
        message += "; something that the step depends on is not part of the state, such as a position in the data"
    return ResumeError(message, first.path, step)
