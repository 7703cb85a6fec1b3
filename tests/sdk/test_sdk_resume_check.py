"""`verify_resume`: a correct training passes; otherwise the error names the first entry that differs."""

import queue
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import Pickled, ResumeError, StateError, differences, verify_resume

Objects = dict[str, Any]


class Model:
    """A model whose weights follow the batches, with momentum."""

    def __init__(self) -> None:
        self.weights = np.zeros(5)
        self.optimizer = {"state": {0: {"exp_avg": np.zeros(5)}}}

    def train(self, batch: float) -> None:
        average = self.optimizer["state"][0]["exp_avg"]
        average *= 0.9
        average += batch * np.arange(1.0, 6.0)
        self.weights -= average

    def state_dict(self) -> Objects:
        return {"weights": self.weights, "optimizer": self.optimizer}

    def load_state_dict(self, state: Objects) -> None:
        self.weights, self.optimizer = state["weights"].copy(), state["optimizer"]


class Forgetful(Model):
    """A model whose state lacks the averages."""

    def state_dict(self) -> Objects:
        return {"weights": self.weights}

    def load_state_dict(self, state: Objects) -> None:
        self.weights = state["weights"].copy()


class Rounding(Model):
    """A model that restores its weights with reduced precision."""

    def state_dict(self) -> Objects:
        return {**super().state_dict(), "half": self.weights.astype("f4")}

    def load_state_dict(self, state: Objects) -> None:
        super().load_state_dict(state)
        self.weights = state["half"].astype("f8")


class Batches:
    """Batches that a thread prefetches. The saved position is that of the batch in use (`sound`) or of the prefetch."""

    def __init__(self, sound: bool) -> None:
        self.sound = sound
        self.used = self.prepared = 0
        self._ready: queue.Queue[tuple[int, float]] | None = None

    def __deepcopy__(self, _: object) -> "Batches":
        return Batches(self.sound)

    def next(self) -> float:
        if self._ready is None:
            self._ready = queue.Queue()
        while self._ready.qsize() < 3:
            # Wait for the thread, so that the number of prefetched batches does not depend on the machine.
            thread = threading.Thread(target=self._prepare, args=(self._ready,))
            thread.start()
            thread.join()
        self.used, batch = self._ready.get()
        return batch

    def _prepare(self, ready: "queue.Queue[tuple[int, float]]") -> None:
        self.prepared += 1
        ready.put((self.prepared, 1 / self.prepared))

    def state_dict(self) -> Objects:
        return {"position": self.used if self.sound else self.prepared}

    def load_state_dict(self, state: Objects) -> None:
        self.used = self.prepared = state["position"]
        self._ready = None


def trains(kind: Callable[[], Model]) -> Callable[[], Objects]:
    return lambda: {"model": kind(), "data": {"position": 0}, "own": random.Random(7)}


def train_step(objects: Objects) -> None:
    """Trains one step that uses the shared generators, the tracked generator and the position."""
    objects["data"]["position"] += 1
    noise = random.random() + np.random.random() + objects["own"].random()
    objects["model"].train(objects["data"]["position"] + noise)


def shared() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("as_function", [True, False])
def test_a_sound_training_passes(as_function: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct training passes; shared generators, objects, signal handlers and the report are unchanged."""
    monkeypatch.setenv("MIZZEN_REPORT", str(tmp_path / "report"))
    make = trains(Model)
    objects = make()
    handler, before = signal.getsignal(signal.SIGTERM), shared()
    verify_resume(train_step, make if as_function else objects, steps=5)
    assert shared() == before and signal.getsignal(signal.SIGTERM) is handler
    assert objects["data"] == {"position": 0} and not objects["model"].weights.any()
    assert not list(tmp_path.iterdir())


def test_state_that_is_not_saved_is_found() -> None:
    """If the averages are not saved, the weights differ after one step; the error has their path and the difference."""
    with pytest.raises(ResumeError) as caught:
        verify_resume(train_step, trains(Forgetful))
    assert (caught.value.path, caught.value.step) == ("model/weights", 1)
    text = str(caught.value)
    assert "differs 1 step after the restore, first at model/weights: 5 of 5 elements differ, by" in text
    assert "not part of the state" in text


def test_state_that_comes_back_otherwise_is_found_at_once() -> None:
    """If weights are rounded by the restore, the error reports the difference before any step."""
    found = r"right after the restore, first at model/weights: .* elements differ"
    with pytest.raises(ResumeError, match=found) as caught:
        verify_resume(train_step, trains(Rounding))
    assert (caught.value.path, caught.value.step) == ("model/weights", 0)


def test_an_entry_deep_in_the_state_is_named_by_its_path() -> None:
    """The path in the error has the keys of all levels."""

    class Reset(Model):
        def load_state_dict(self, state: Objects) -> None:
            super().load_state_dict(state)
            self.optimizer["state"][0]["exp_avg"][2] += 0.5

    with pytest.raises(ResumeError, match=r"1 of 5 elements differ, by 0\.5 at most") as caught:
        verify_resume(train_step, trains(Reset))
    assert caught.value.path == "model/optimizer/state/0/exp_avg"


def test_prefetched_batches() -> None:
    """Saving the position of the batch in use passes; saving the position of the prefetch loses batches and fails."""

    def step(objects: Objects) -> None:
        objects["model"].train(objects["batches"].next())

    def make(sound: bool) -> Callable[[], Objects]:
        return lambda: {"model": Model(), "batches": Batches(sound)}

    verify_resume(step, make(True))
    verify_resume(step, make(True)())
    for state in (make(False), make(False)()):
        with pytest.raises(ResumeError, match=r"first at model/weights: .*\(and [0-9]+ more, in .*batches") as caught:
            verify_resume(step, state)
        assert caught.value.step == 1


def test_a_generator_that_is_not_tracked_is_found() -> None:
    """A random generator that is not part of the state makes the weights differ."""

    class Noisy(Model):
        def __init__(self) -> None:
            super().__init__()
            self.noise = random.Random(3)

        def train(self, batch: float) -> None:
            super().train(batch + self.noise.random())

    with pytest.raises(ResumeError, match="after the restore, first at model/weights"):
        verify_resume(train_step, trains(Noisy))


def test_more_draws_of_the_shared_generator_are_found() -> None:
    """A draw that only the first step of a process makes changes the state of the shared generator."""

    def step(objects: Objects) -> None:
        if not hasattr(objects["model"], "begun"):
            objects["model"].begun = random.random()

    with pytest.raises(ResumeError) as caught:
        verify_resume(step, trains(Model))
    assert caught.value.path.startswith("rng/python") and caught.value.step == 1


def test_a_step_that_uses_other_objects_is_told() -> None:
    """If `train_step` trains other objects than it receives, the error says that the state did not change."""
    elsewhere = trains(Model)()

    def step(_: Objects) -> None:
        train_step(elsewhere)

    made = iter([elsewhere, trains(Model)()])
    with pytest.raises(ResumeError, match="did not change at all: does train_step use the objects that it receives"):
        verify_resume(step, lambda: next(made))


def test_a_later_step_is_compared_too() -> None:
    """A difference at the third step is found with `steps=3` but not with `steps=2`."""

    class Late(Model):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def train(self, batch: float) -> None:
            self.calls += 1
            super().train(0 if self.calls == 4 else batch)

    verify_resume(train_step, trains(Late), steps=2)
    with pytest.raises(ResumeError, match="differs 3 steps after the restore"):
        verify_resume(train_step, trains(Late), steps=3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((train_step, trains(Model)), {"steps": 0}, ValueError, "steps=0: must be an integer, 1 or more"),
        ((train_step, trains(Model)), {"before": -1}, ValueError, "before=-1: must be an integer, 0 or more"),
        ((train_step, trains(Model)), {"steps": 1.5}, ValueError, "steps=1.5"),
        ((lambda: None, trains(Model)), {}, TypeError, r"train_step must take the dict of objects"),
        ((train_step, {"lock": {"a": threading.Lock()}}), {}, StateError, "cannot be copied .* pass a function"),
        ((train_step, {"pair": (lambda: 1, lambda _: None)}), {}, StateError, "a pair of functions cannot be copied"),
        ((train_step, {"number": 3}), {}, StateError, "part 'number': builtins.int cannot be tracked"),
        ((lambda _: None, {"data": {"a": object()}}), {}, StateError, "part 'data' at a: builtins.object cannot be"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arguments: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Invalid arguments are errors that name the argument or the part."""
    with pytest.raises(error, match=message):
        verify_resume(*arguments, **options)


def test_the_same_objects_twice_are_refused() -> None:
    """A function that returns the same objects twice is an error, because a training would be compared with itself."""
    objects = trains(Model)()
    with pytest.raises(StateError, match="'model' is the same object in both copies"):
        verify_resume(train_step, lambda: objects)


def test_an_error_of_a_step_says_in_which_training() -> None:
    """An exception of `train_step` is raised unchanged, with a note that names the training and the step."""

    def fails(objects: Objects) -> None:
        train_step(objects)
        if objects["data"]["position"] == 3:
            raise OSError("no more data")

    with pytest.raises(OSError, match="no more data") as caught:
        verify_resume(fails, trains(Model))
    assert caught.value.__notes__ == ["in the uninterrupted training, at step 3"]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (float("nan"), float("nan"), []), (0.0, -0.0, ["p"]), (1, 1.0, []), (True, 1, ["p"]), (2, 5, ["p"]),
        ({"a": 1}, {"b": 1}, ["p/a", "p/b"]), ([1, 2], [1], ["p"]), ((1,), [1], ["p"]), (b"a", bytearray(b"a"), []),
        (b"a", b"b", ["p"]), (np.array([np.nan]), np.array([np.nan]), []), (np.arange(3), np.arange(3.0), ["p"]),
        (np.zeros(3), np.zeros((3, 1)), ["p"]), (np.zeros(2), -np.zeros(2), ["p"]), (1 + 2j, 1 + 3j, ["p"]),
        (Pickled([1]), Pickled([1]), []), (Pickled([1]), Pickled([2]), ["p"]), ("x", "y", ["p"]), (None, 0, ["p"]),
        (np.array([1 + 1j]), np.array([1 + 2j]), ["p"]), (np.array([True]), np.array([False]), ["p"]),
    ],
)  # fmt: skip
def test_values_are_compared_bit_by_bit(left: Any, right: Any, expected: list[str]) -> None:
    """Floats and arrays are compared bit by bit and dicts key by key; each difference has a description."""
    found = list(differences.between({"p": left}, {"p": right}))
    assert [one.path for one in found] == expected
    assert all(one.how for one in found)
