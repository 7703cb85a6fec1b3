"""Tracked dicts are filled in place, so that a script may hold their inner objects under other names."""

import warnings
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import CheckpointWarning, Tracked


class Basis:
    """Has an array as an attribute."""

    def __init__(self) -> None:
        self.array = np.zeros((3, 2))


def restored(table: Any, content: Any) -> None:
    """Restores a tracked dict to a content."""
    state = Tracked({"table": content}).capture(1)
    Tracked({"table": table}).restore(state)


def test_inner_objects_stay_the_same() -> None:
    """Dicts, lists, tuples, arrays and bytes that fit are filled in place, at any depth."""
    array, items, inner, raw = np.zeros(3), [np.zeros(2), 5], OrderedDict(a=1, b=2), bytearray(b"old")
    counts, pair = Counter("aab"), ([0], "x")
    table = defaultdict(
        list, {"array": array, "items": items, "inner": inner, "raw": raw, "counts": counts, "pair": pair}
    )
    first = items[0]
    new = {
        "inner": {"c": 3}, "array": np.arange(3.0), "items": [np.ones(2), 6, 7], "raw": b"newer",
        "counts": Counter("b"), "pair": ([1, 2], "y"), "more": 1,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(table, new)
    assert array.tolist() == [0, 1, 2] and table["array"] is array
    assert items[0] is first and first.tolist() == [1, 1] and items[1:] == [6, 7]
    assert type(inner) is OrderedDict and inner == {"c": 3} and table["inner"] is inner
    assert raw == b"newer" and counts == {"b": 1} and table["counts"] is counts
    assert table["pair"] == ([1, 2], "y") and table["pair"][0] is pair[0]
    assert list(table) == list(new)


def test_what_is_replaced_is_named_if_the_script_holds_it() -> None:
    """A warning names the path of an array that no longer fits and to which something else refers."""
    held = np.zeros(3)
    with pytest.warns(CheckpointWarning, match="^table/ema/0: replaced, because its type or shape") as said:
        restored({"ema": [held], "other": np.zeros(2)}, {"ema": [np.ones(4)], "other": np.ones(5)})
    assert len(said) == 1
    assert held.tolist() == [0, 0, 0]


def test_what_only_the_dict_holds_is_replaced_silently() -> None:
    """Placeholders of another type, shape or size are no reason for a warning."""
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    table = {"best": {}, "seen": np.zeros(0), "none": None, "step": 1, "frozen": frozen}
    del frozen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(table, {"best": None, "seen": np.ones(3), "none": [1], "step": 2, "frozen": np.ones(2)})
    assert table["best"] is None and table["seen"].tolist() == [1, 1, 1] and table["none"] == [1]  # type: ignore[union-attr]


def test_a_failed_restore_puts_inner_objects_back() -> None:
    """If the load of a later object fails, each container has its old items, and each array its old values."""
    array, items = np.zeros(3), [1, 2]

    def fail(_: object) -> None:
        raise ValueError("no")

    table = {"array": array, "items": items, "old": 1}
    one = Tracked({"table": table, "pair": (dict, fail)})
    state = one.capture(1)
    state["table"] = {"array": np.ones(3), "items": [5], "new": 2}
    with pytest.warns(match="could not be put back"), pytest.raises(ValueError, match="no"):
        one.restore(state)
    assert table == {"array": array, "items": [1, 2], "old": 1} and table["items"] is items
    assert array.tolist() == [0, 0, 0]


def test_an_array_in_another_order_of_memory() -> None:
    """It replaces one that only the dict has, because the training has replaced it, too; another one is filled."""
    held, content = np.zeros((3, 2)), {"free": np.arange(6.0).reshape(2, 3).T, "held": np.arange(6.0).reshape(2, 3).T}
    table = {"free": np.zeros((3, 2)), "held": held}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored(table, content)
    assert table["free"].strides == content["free"].strides and (table["free"] == content["free"]).all()
    assert table["held"] is held and (held == content["held"]).all()


def test_an_attribute_in_another_order_of_memory() -> None:
    """It gets the order of the array by which the training has replaced the first one."""
    trained, fresh = Basis(), Basis()
    tracked = Tracked({"basis": trained})
    tracked.begin()
    trained.array = np.arange(6.0).reshape(2, 3).T
    Tracked({"basis": fresh}).restore(tracked.capture(1))
    assert fresh.array.strides == trained.array.strides and (fresh.array == trained.array).all()
