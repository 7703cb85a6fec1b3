"""`verify_resume`: checks that a training which is restored from a checkpoint continues bit-identically.

    def make():
        model = build_model()
        optimizer = torch.optim.Adam(model.parameters())
        return {"model": model, "optimizer": optimizer, "batches": Batches()}

    def train_step(state):
        ...

    verify_resume(train_step, make, steps=5)

If a checkpoint lacks part of the state, a resumed training gives slightly different results, without an error. This
check finds it in a test and reports the first entry that differs.
"""

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

from mizzen.checkpoint import differences, parts, rng
from mizzen.checkpoint.attributes import ATTRIBUTES
from mizzen.checkpoint.errors import CheckpointError, StateError
from mizzen.checkpoint.place import Gang, Retention
from mizzen.checkpoint.root_view import open_checkpoints
from mizzen.checkpoint.tracked_objects import PROGRESS, RNG, Tracked
from mizzen.checkpoint.writer import open_writer
from mizzen.objects.files import FileStore

State: TypeAlias = Mapping[str, Any]


class ResumeError(CheckpointError):
    """A training that was resumed from its checkpoint differs from the one that continued."""

    def __init__(self, message: str, path: str, step: int) -> None:
        super().__init__(message)
        self.path = path
        """The first entry that differs, such as `optimizer/state/0/exp_avg`."""
        self.step = step
        """Number of steps after the restore at which it differs; 0 right after the restore."""


def verify_resume(
    train_step: Callable[[Any], object],
    state: State | Callable[[], State],
    *,
    steps: int = 3,
    before: int = 1,
) -> None:
    """Check that a resumed training equals an uninterrupted one, bit by bit.

    Trains, saves, restores into a fresh copy, trains both copies, and compares their full states after each step. Each
    copy has its own state of the global random generators; the generators are restored at the end. The checkpoint is
    written to a temporary folder and is not reported to a scheduler.

    Args:
        train_step: does one training step on the dict of objects that it receives. It must not use other mutable state.
        state: a function that creates all objects and returns them as a dict, as for `Checkpointer.track`. Or such a
            dict, which is copied with `copy.deepcopy` and not changed.
        steps: number of steps to compare, 1 or more.
        before: number of steps to train before the save. With 0, an optimizer has no state yet.

    Raises:
        ResumeError: an entry differs. The message gives the first one, after which step, and by how much.
        StateError: the state cannot be stored, tracked or copied.
        ValueError: `steps` or `before` is out of range.
        TypeError: `train_step` does not accept the dict of objects.
    """
    for name, number, least in (("steps", steps, 1), ("before", before, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r}: must be an integer, {least} or more")
    shared = rng.capture_shared()
    try:
        make = state if callable(state) else _copier(state)
        _verify(train_step, make, steps, before)
    finally:
        rng.restore_shared(shared)


def _verify(train_step: Callable[[Any], object], make: Callable[[], State], steps: int, before: int) -> None:
    straight = _Run("the uninterrupted training", train_step, make())
    for step in range(1, before + 1):
        straight.train(step)
    fresh = make()
    if shared := _shared(straight.objects, fresh):
        raise StateError(f"state: {shared!r} is the same object in both copies; the function must create new objects")
    resumed = _Run("the resumed training", train_step, fresh)
    loaded = _through_a_checkpoint(before, straight.capture(before))
    resumed.restore(loaded)
    saved = copy.deepcopy(loaded)
    for step in range(steps + 1):
        if step:
            straight.train(before + step)
            resumed.train(before + step)
        left, right = straight.capture(before + step), resumed.capture(before + step)
        # An attribute of a module may hold a time.
        found = [one for one in differences.between(left, right) if one.path.split("/")[0] != ATTRIBUTES]
        if found:
            raise _error(found, step, stuck=step > 0 and _is_as_saved(saved, right) and not _is_as_saved(saved, left))


class _Run:
    """One of the two trainings, with its own states of the global random generators."""

    def __init__(self, name: str, train_step: Callable[[Any], object], objects: State) -> None:
        self.name = name
        self.objects = objects
        self._train_step = train_step
        self._tracked = Tracked(objects)
        self._tracked.begin()
        self._rng = rng.capture_shared()
        try:
            inspect.signature(train_step).bind(objects)
        except TypeError as error:
            raise TypeError(f"train_step must take the dict of objects, as in train_step(state): {error}") from None
        except ValueError:
            return  # A builtin may have no signature.

    def train(self, step: int) -> None:
        """Run one training step. `step` is its number, for error messages."""
        rng.restore_shared(self._rng)
        try:
            self._train_step(self.objects)
        except Exception as error:
            error.add_note(f"in {self.name}, at step {step}")
            raise
        self._rng = rng.capture_shared()

    def capture(self, step: int) -> dict[str, Any]:
        """Return the state as a checkpoint stores it."""
        rng.restore_shared(self._rng)
        return self._tracked.capture(step)

    def restore(self, state: State) -> None:
        """Restore the objects from a state."""
        self._tracked.restore(state)
        self._rng = rng.capture_shared()


def _through_a_checkpoint(step: int, state: State) -> dict[str, Any]:
    """Save the state to a temporary root, and return it as loaded from there."""
    encoded = {name: parts.encode(name, value) for name, value in state.items()}
    with tempfile.TemporaryDirectory(prefix="mizzen-") as folder:
        open_writer(FileStore(Path(folder)), 1, Gang(), Retention(1)).write(step, encoded)
        return open_checkpoints(folder).load(step, trusted=True).state


def _copier(state: State) -> Callable[[], State]:
    hint = "pass a function that creates all objects instead of the objects"
    for name, value in state.items():
        if isinstance(value, tuple) and any(isinstance(one, FunctionType) for one in value):
            raise StateError(f"state[{name!r}]: a pair of functions cannot be copied; {hint}")

    def make() -> State:
        try:
            # Copy all objects in one call: a copied optimizer must refer to the parameters of the copied model.
            return copy.deepcopy(dict(state))
        except Exception as error:
            raise StateError(f"state: cannot be copied ({error}); {hint}") from error

    return make


def _shared(left: State, right: State) -> str | None:
    """Return the name of an object that both states share; None if there is none."""
    return next((name for name in left if name in right and left[name] is right[name]), None)


def _is_as_saved(saved: State, now: State) -> bool:
    apart = (RNG, PROGRESS, ATTRIBUTES)
    return not any(True for found in differences.between(saved, now) if found.path.split("/")[0] not in apart)


def _error(found: list[differences.Difference], step: int, stuck: bool) -> ResumeError:
    first = found[0]
    when = "right after the restore" if not step else f"{step} step{'s' if step > 1 else ''} after the restore"
    message = f"the resumed training differs {when}, first at {first.path}: {first.how}"
    others = dict.fromkeys(one.path.split("/")[0] for one in found[1:])
    if len(found) > 1:
        message += f" (and {len(found) - 1} more, in {', '.join(others)})"
    if stuck:
        message += "; its state did not change at all: does train_step use the objects that it receives?"
    elif not step:
        message += "; the saved value is not restored: check that load_state_dict restores all that state_dict returns"
    else:
        message += "; the step depends on something that is not part of the state, such as a position in the data"
    return ResumeError(message, first.path, step)
