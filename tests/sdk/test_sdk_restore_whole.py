"""A restore changes all tracked objects or none: whichever read or load fails, the objects are as they were before."""

import errno
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import Checkpointer, CheckpointError, Tracked


class Model:
    """A model that takes over its new weights one by one."""

    def __init__(self, value: float) -> None:
        self.weights = [np.full(5, value), np.full(9_000, value)]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, new in zip(self.weights, state["weights"], strict=True):
            mine[:] = new


class Stubborn(Model):
    """A model whose load fails after it has changed a weight."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights[0][:] = state["weights"][0]
        if state["weights"][1][0] == 12.0:
            raise ValueError("no")
        super().load_state_dict(state)


def objects(value: float, kind: type[Model] = Model) -> dict[str, Any]:
    """Returns objects of all kinds with a value."""
    table = {"ema": [np.full(3, value)], "best": value, "names": {"a": value}}
    return {"model": Model(value), "dice": random.Random(value), "table": table, "last": kind(value + 10)}


def tracked(root: Path, value: float, **given: Any) -> tuple[Checkpointer, Tracked]:
    """Returns a checkpointer of objects with a value, and the tracked objects."""
    checkpointer = Checkpointer(root, **given)
    checkpointer.track(**objects(value))
    checkpointer.progress["epoch"] = value
    return checkpointer, checkpointer._tracked


def picture(one: Tracked) -> str:
    """Returns the values of all objects, in a form that does not change with them."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tobytes()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    found = {name: plain(save()) for name, (save, _) in one._parts.items()}
    return repr((found, one.progress, random.getstate(), plain(np.random.get_state(legacy=False))))


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def test_after_any_failing_read_nothing_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of a restore fails once, for good: the error is raised, and all objects are as they were."""
    saver, saved = tracked(tmp_path, 2.0)
    saver.save(1, saved.capture(1))
    real, count, limit = os.preadv, 0, 0

    def read(*given: Any) -> int:
        nonlocal count
        count += 1
        if count > limit:
            raise PermissionError(errno.EACCES, "no")
        return real(*given)

    monkeypatch.setattr(os, "preadv", read)
    for limit in range(1000):  # noqa: B007 (`read` uses it)
        checkpointer, one = tracked(tmp_path, 1.0)
        before = picture(one)
        count = 0
        try:
            step = checkpointer.restore()
        except CheckpointError:
            assert picture(one) == before
        else:
            break
    assert step == 1 and limit > 5
    assert one.progress == {"epoch": 2.0, "step": 1}


@pytest.mark.parametrize("start_over", [False, True])
def test_after_any_damage_nothing_has_changed(tmp_path: Path, start_over: bool) -> None:
    """A flipped bit in any part: the objects are as they were, and the step is 0 only if `start_over` is set."""
    saver, saved = tracked(tmp_path, 2.0)
    manifest = saver.save(1, saved.capture(1))
    for part in manifest.parts:
        path = tmp_path / part.key
        whole = path.read_bytes()
        path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 0x40]) + whole[-4:])
        checkpointer, one = tracked(tmp_path, 1.0, start_over=start_over)
        before = picture(one)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if start_over:
                assert checkpointer.restore() == 0
            else:
                with pytest.raises(CheckpointError, match="can be loaded"):
                    checkpointer.restore()
        assert picture(one) == before, part.name
        path.write_bytes(whole)


def test_objects_are_put_back_if_the_load_of_another_fails() -> None:
    """The error of an object's own load is raised; it and the objects before it have their old values."""
    one = Tracked(objects(1.0, Stubborn))
    one.progress["epoch"] = 1
    state = Tracked(objects(2.0)).capture(7)
    random.random(), np.random.random()
    before = picture(one)
    with pytest.raises(ValueError, match="no"):
        one.restore(state)
    assert picture(one) == before


def test_an_object_that_cannot_be_put_back_is_named() -> None:
    """If the old state cannot be loaded either, a warning names the part; the error is the first one."""

    def fail(_: object) -> None:
        raise ValueError("first")

    one = Tracked({"pair": (lambda: {"a": 1}, fail)})
    with pytest.warns(match="part 'pair' could not be put back"), pytest.raises(ValueError, match="first"):
        one.restore(one.capture(1))


def test_what_cannot_be_stored_is_found_before_anything_changes(tmp_path: Path) -> None:
    """A tracked object with a value that cannot be stored is an error of the restore, before it loads anything."""
    saver, saved = tracked(tmp_path, 2.0)
    saver.save(1, {**saved.capture(1), "odd": {"a": 1}})
    checkpointer, one = tracked(tmp_path, 1.0)
    checkpointer.track(odd={"a": object()})
    before = picture(one)
    with pytest.raises(CheckpointError, match=r"part 'odd' at a: builtins\.object cannot be stored"):
        checkpointer.restore()
    assert picture(one) == before
