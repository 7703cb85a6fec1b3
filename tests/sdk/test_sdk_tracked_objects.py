"""The registry of tracked objects, whose states are captured and restored as named parts."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import StateError, Tracked
from mizzen.checkpoint.parts import decode, encode


class Model:
    """A model with the state interface of torch."""

    def __init__(self) -> None:
        self.weights = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights[:] = state["weights"]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state after encoding and decoding."""
    files = {name: encode(name, value) for name, value in state.items()}
    return {name: decode(kind, bytearray(b"".join(chunks))) for name, (kind, chunks) in files.items()}


def test_what_is_tracked_comes_back() -> None:
    """`restore` restores objects, pairs of functions, dicts (in place) and the progress."""
    model, table, box = Model(), {"seen": [1, 2]}, [5]
    tracked = Tracked(
        {"model": model, "table": table, "box": (lambda: box[0], lambda value: box.__setitem__(0, value))}
    )
    tracked.progress["epoch"] = 2
    model.weights[:] = 1
    state = stored(tracked.capture(40))
    assert list(state) == ["model", "table", "box", "rng", "progress"] == list(tracked.names)
    model.weights[:], box[0] = 9, 9
    table.clear()
    tracked.progress.update(epoch=7, more=1)
    tracked.restore(state)
    assert model.weights.tolist() == [1, 1, 1]
    assert (table, box, tracked.progress) == ({"seen": [1, 2]}, [5], {"step": 40, "epoch": 2})


def test_the_user_may_bring_the_progress() -> None:
    """A dict tracked as `progress` receives the step."""
    mine = {"epoch": 1}
    tracked = Tracked({"progress": mine})
    state = tracked.capture(3)
    mine["epoch"] = 5
    tracked.restore(state)
    assert mine == {"epoch": 1, "step": 3}
    assert tracked.names == ("rng", "progress")


MAKERS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: random.Random(1), lambda one: [one.gauss(0, 1) for _ in range(3)]),
    (lambda: np.random.default_rng(1), lambda one: one.random(3).tolist()),
    (lambda: np.random.Generator(np.random.MT19937(1)), lambda one: one.random(3).tolist()),
    (lambda: np.random.Generator(np.random.Philox(1)), lambda one: one.integers(100, size=3, dtype=np.int32).tolist()),
    (lambda: np.random.SFC64(1), lambda one: one.random_raw(3).tolist()),
    (lambda: np.random.RandomState(1), lambda one: one.normal(size=3).tolist()),
]


@pytest.mark.parametrize(("make", "draw"), MAKERS)
def test_generators_go_on_where_they_were(make: Callable[[], Any], draw: Callable[[Any], Any]) -> None:
    """A tracked generator draws the same numbers after a restore as after the capture, also in another object."""
    one, other = make(), make()
    draw(one)
    tracked, fresh = Tracked({"dice": one}), Tracked({"dice": other})
    state = stored(tracked.capture(1))
    expected = draw(one)
    fresh.restore(state)
    assert draw(other) == expected


def test_the_shared_generators_are_tracked_by_themselves() -> None:
    """Python's and numpy's global generators are restored last, so draws of objects during a load have no effect."""

    class Wasteful(Model):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            random.random(), np.random.random()

    def draw() -> tuple[float, float, float]:
        return random.gauss(0, 1), np.random.normal(), np.random.random()

    python, numpy = random.getstate(), np.random.get_state()
    try:
        draw()
        tracked = Tracked({"model": Wasteful()})
        state = stored(tracked.capture(1))
        expected = draw()
        draw()
        tracked.restore(state)
        assert draw() == expected
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class Batches:
    """A loader that restores the generators at its first batch, if it was saved within its iteration."""

    def __init__(self) -> None:
        self.position = 0
        self.restore: Callable[[], None] | None = None

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def resume_generators(self, restore: Callable[[], None]) -> bool:
        self.restore = restore if self.position else None
        return self.restore is not None


@pytest.mark.parametrize("within", [True, False])
def test_a_loader_restores_the_generators_when_it_resumes(within: bool) -> None:
    """Until the iteration resumes, a script draws as at its start; a capture has the loaded states meanwhile."""
    batches = Batches()
    tracked = Tracked({"first": Batches(), "batches": batches})
    batches.position = int(within)
    random.seed(5)
    state = stored(tracked.capture(3))
    expected = random.random()
    random.seed(9)
    split = random.random()
    random.seed(9)
    tracked.restore(state)
    assert random.random() == (split if within else expected)
    if within:
        assert stored(tracked.capture(3))["rng"]["python"] == state["rng"]["python"]
        assert batches.restore is not None
        batches.restore()
        assert random.random() == expected
        batches.restore()
        assert random.random() != expected


def test_generators_that_nobody_restored_are_given_up_at_the_next_step() -> None:
    """If the training continues without the loader, later checkpoints have the current states of the generators."""
    batches = Batches()
    tracked = Tracked({"batches": batches})
    batches.position = 1
    tracked.restore(stored(tracked.capture(3)))
    random.seed(1)
    expected = random.getstate()
    assert tracked.capture(4)["rng"]["python"] == expected
    assert batches.restore is not None
    batches.restore()
    assert random.getstate() == expected


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """Missing and unknown parts are errors before anything is restored; `extra_ok=True` allows unknown ones."""
    model = Model()
    tracked = Tracked({"model": model, "scheduler": {}})
    state = tracked.capture(1)
    state["model"] = {"weights": np.ones(3)}
    with pytest.raises(StateError, match="lacks the tracked parts 'scheduler'; it has 'model', 'rng', 'progress'"):
        tracked.restore({name: value for name, value in state.items() if name != "scheduler"})
    with pytest.raises(StateError, match=r"the checkpoint has parts that are not tracked, 'ema': .* extra_ok=True"):
        tracked.restore({**state, "ema": 1})
    assert model.weights.tolist() == [0, 0, 0]
    tracked.restore({**state, "ema": 1}, extra_ok=True)
    assert model.weights.tolist() == [1, 1, 1]


def test_only_some_parts_are_restored_if_asked() -> None:
    """`missing_ok` leaves objects that the state lacks as they are; `parts` restores only those that it names."""
    model, table = Model(), {"a": 1}
    tracked = Tracked({"model": model, "table": table})
    state = {**tracked.capture(5), "model": {"weights": np.ones(3)}, "table": {"a": 2}, "more": 1}
    lacking = {name: value for name, value in state.items() if name not in ("table", "more")}
    with pytest.raises(StateError, match=r"lacks the tracked parts 'table'; .* pass missing_ok=True to restore"):
        tracked.restore(lacking)
    tracked.restore(lacking, missing_ok=True)
    assert model.weights.tolist() == [1, 1, 1] and table == {"a": 1}
    model.weights[:], tracked.progress["step"] = 0, 7
    tracked.restore(state, parts=["table"])
    assert model.weights.tolist() == [0, 0, 0] and table == {"a": 2} and tracked.progress == {"step": 7}
    for wrong, name in ((["tabel"], "'tabel'"), ("table", "'table'")):
        with pytest.raises(
            StateError, match=f"parts: {name} must be names of tracked parts; these are 'model', 'table'"
        ):
            tracked.restore(state, parts=wrong)
    with pytest.raises(StateError, match="lacks the tracked parts 'table'"):
        tracked.restore(lacking, parts=["table"])


def test_an_objects_own_error_names_the_part() -> None:
    """An exception of an object's own code is raised unchanged, with a note that names the part."""
    tracked = Tracked({"model": Model()})
    with pytest.raises(ValueError, match="broadcast") as caught:
        tracked.restore({**tracked.capture(1), "model": {"weights": np.ones(4)}})
    assert caught.value.__notes__ == ["while restoring the part 'model'"]


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"model": 3}, r"part 'model': builtins.int cannot be tracked; use an object of your own classes, or"),
        ({"model": (print, 3)}, r"part 'model': builtins.tuple cannot be tracked"),
        ({"a/b": {}}, r"part 'a/b': a name must be"),
        ({"rng": {}}, r"part 'rng' is saved by mizzen itself"),
        ({"progress": Model()}, r"part 'progress': is a Model; must be a dict"),
        ({"table": {}}, r"part 'table' is already tracked"),
    ],
)
def test_what_cannot_be_tracked_is_refused(objects: dict[str, Any], message: str) -> None:
    """An invalid name or object is an error that names it, and no object of the call is tracked."""
    tracked = Tracked({"table": {}})
    with pytest.raises(StateError, match=message):
        tracked.add({"good": {}, **objects})
    assert tracked.names == ("table", "rng", "progress")
