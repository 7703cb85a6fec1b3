"""Attributes that a training changes from None, or to another class: a restart has the same values."""

import copy
import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mizzen import Checkpointer
from mizzen.checkpoint import CheckpointWarning, Tracked
from mizzen.checkpoint.attributes import ChangedAttributes
from mizzen.integrations.torch import ResumableLoader


class Meter:
    """A mean, as scripts write it."""

    def __init__(self, total: float = 0.0) -> None:
        self.total, self.seen = total, [total]


class Peak(Meter):
    """Another class."""

    def __init__(self, total: float = 0.0) -> None:
        super().__init__(total)
        self.peak = total


@dataclass(frozen=True)
class Frozen:
    """Cannot be changed."""

    loss: float
    weights: Any = None


@dataclass(slots=True)
class Slots:
    """Has no `__dict__`."""

    loss: float
    more: list[Any] = field(default_factory=list)


class Phase(enum.Enum):
    """What a training does now."""

    WARM, MAIN = 1, 2


class Level(enum.IntEnum):
    """Is a number, too."""

    LOW, HIGH = 1, 2


class History(list[Any]):
    """A list of a class of its own."""


Pair = namedtuple("Pair", "a b")


def _normal_generator() -> Any:
    made = torch.Generator().manual_seed(3)
    torch.randn(3, generator=made)
    return made


FROM: dict[str, tuple[Any, Callable[[], Any]]] = {
    "tensor": (None, lambda: torch.ones(2)),
    "leaf": (None, lambda: torch.ones(2, requires_grad=True)),
    "no leaf": (torch.ones(2), lambda: torch.ones(2, requires_grad=True)),
    "number": (None, lambda: 1.5),
    "number from tensor": (torch.ones(2), lambda: 1.5),
    "tensor from number": (float("inf"), lambda: torch.ones(2)),
    "none again": (Meter(), lambda: None),
    "list": (None, lambda: [1, "x", b"x"]),
    "dict from list": ([], lambda: {1: torch.ones(1)}),
    "array": (None, lambda: np.ones(2)),
    "texts": (None, lambda: np.array(["a", "bc"])),
    "records": (None, lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])),
    "a text of numpy": (None, lambda: np.str_("ab")),
    "a date": (None, lambda: np.datetime64("2020-01-01")),
    "dates": (None, lambda: np.array(["2020-01-01"], dtype="datetime64[D]")),
    "bytes": (None, lambda: bytearray(b"x")),
    "counter": (None, lambda: Counter("aab")),
    "more counted": (Counter("a"), lambda: Counter("aab")),
    "with defaults": (None, lambda: defaultdict(list, a=[1])),
    "ordered": (None, lambda: OrderedDict(b=1, a=2)),
    "weights": (None, lambda: copy.deepcopy(nn.Linear(1, 1).state_dict())),
    "history": (None, lambda: History([1])),
    "pair": (None, lambda: Pair(1, torch.ones(1))),
    "deque": (None, lambda: deque([1], 3)),
    "object": (None, lambda: Meter(2.0)),
    "object of a subclass": (Meter(1.0), lambda: Peak(2.0)),
    "object from number": (1.0, lambda: Meter(2.0)),
    "slots": (None, lambda: Slots(2.0, [1])),
    "changed slots": (Slots(1.0), lambda: Slots(2.0)),
    "frozen": (None, lambda: Frozen(2.0, {"w": torch.ones(1)})),
    "nested": (None, lambda: Frozen(2.0, [Meter(1.0), {"a": Phase.MAIN}])),
    "objects in a list": ([], lambda: [Meter(1.0), 2.0]),
    "objects in a dict": ({}, lambda: {"a": Meter(1.0), "best": None}),
    "member": (None, lambda: Phase.MAIN),
    "member of integers": (1, lambda: Level.HIGH),
    "member of another one": (Phase.WARM, lambda: Level.HIGH),
    "generator of numpy": (None, lambda: np.random.default_rng(5)),
    "generator of torch": (None, _normal_generator),
    "generator of Python": (None, lambda: random.Random(5)),
    "old generator of numpy": (None, lambda: np.random.RandomState(5)),
    "generators": (None, lambda: [np.random.Generator(np.random.Philox(5))]),
    "path": (None, lambda: Path("best.pt")),
    "type": (None, lambda: torch.float64),
    "loss": (nn.functional.mse_loss, lambda: nn.functional.l1_loss),
    "class": (Meter, lambda: Peak),
    "size": (None, lambda: torch.Size([1, 2])),
}


def shown(value: Any) -> Any:
    """Returns the types and the content of a value, to compare it."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return kind, str(value.dtype), value.requires_grad, value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return kind, str(value.dtype), value.tolist()
    if isinstance(value, np.random.Generator):
        return kind, str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return kind, value.get_state().tolist()
    if isinstance(value, random.Random | np.random.RandomState):
        return kind, str(value.getstate() if isinstance(value, random.Random) else value.get_state())
    if isinstance(value, Slots):
        return kind, value.loss, value.more
    if isinstance(value, dict):
        return kind, getattr(value, "default_factory", None), [(key, shown(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), [shown(one) for one in value]
    if isinstance(value, nn.Module):
        return kind, shown(dict(value.state_dict())), value.training
    return (kind, shown(vars(value))) if isinstance(value, Meter | Frozen) else (kind, repr(value))


class Data(torch.utils.data.Dataset[int]):
    """A dataset."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Own(torch.optim.SGD):
    """An optimizer of the script."""


def started(kind: str, root: Path, values: dict[str, Any]) -> tuple[Any, Checkpointer, Any]:
    """Returns an object with these attributes, a checkpointer, and an iterator of the data."""
    net = nn.Linear(1, 1)
    loader = ResumableLoader(Data(), batch_size=1)
    objects = {"net": net, "optimizer": Own(net.parameters(), 0.1), "loader": loader}
    held: Any = loader.dataset if kind == "loader" else objects[kind]
    vars(held).update(copy.deepcopy(values))
    checkpointer = Checkpointer(root, interval_s=0)
    checkpointer.track(**objects)
    checkpointer.restore()
    iterator = iter(loader)
    next(iterator)
    return held, checkpointer, iterator


@pytest.mark.filterwarnings("error::mizzen.checkpoint.CheckpointWarning")
@pytest.mark.parametrize("kind", ["net", "optimizer", "loader"])
def test_a_restart_has_the_same_values(kind: str, tmp_path: Path) -> None:
    """Of each type, in a module, an optimizer and a dataset."""
    before = {name: value for name, (value, _) in FROM.items()}
    held, checkpointer, iterator = started(kind, tmp_path, before)
    vars(held).update({name: make() for name, (_, make) in FROM.items()})
    checkpointer.step(1)
    next(iterator)
    checkpointer.step(2)
    checkpointer.wait()
    again = started(kind, tmp_path, before)[0]
    wrong = {name: shown(vars(again)[name]) for name in FROM if shown(vars(again)[name]) != shown(vars(held)[name])}
    assert wrong == {}


class Net(nn.Module):
    """A module with parts of several classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
        self.act: nn.Module = nn.ReLU()
        self.stages, self.stage = [Meter(1.0), Meter(2.0)], None
        self.copies: list[nn.Module] = []
        self.best: Any = None


def resumed(saved: dict[str, Any], net: nn.Module) -> Any:
    """Restores attributes into a module."""
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    attributes.restore(saved)
    return net


def test_copies_of_modules() -> None:
    """Copies of the best model, in an attribute or a list, keep weights, buffers, classes, modes and tied weights."""
    net = Net()
    net.body[2].weight_ih_l0 = net.body[2].weight_hh_l0
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    kept = copy.deepcopy(net.body).eval()
    vars(net)["best"] = (0.5, kept)
    net.copies.append(copy.deepcopy(net.body))
    saved = attributes.changed()
    again: Any = resumed(saved, Net())
    assert shown(again.best[1]) == shown(kept) and shown(again.copies[0]) == shown(net.copies[0])
    assert again.best[1][2].weight_ih_l0 is again.best[1][2].weight_hh_l0
    assert all(one.requires_grad for one in again.copies[0].parameters())
    inputs = torch.ones(3, 2)
    assert torch.equal(again.best[1](inputs)[0], kept(inputs)[0])


def test_a_copy_of_a_large_module() -> None:
    """It may have many modules inside, and a mask, hooks and attributes of its own."""
    net: Any = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1)) for _ in range(200)])
    net.kept = []
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    body = copy.deepcopy(net).requires_grad_(False)
    body[0].scale, body[0].kept = 3.0, {"a": Phase.MAIN}
    net.kept = [body]
    again: Any = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1)) for _ in range(200)])
    again.kept = []
    made = resumed(attributes.changed(), again).kept[0]
    assert shown(made) == shown(body) and (made[0].scale, made[0].kept) == (3.0, {"a": Phase.MAIN})
    assert vars(made[5][0]).keys() == vars(body[5][0]).keys()
    assert not any(one.requires_grad for one in made.parameters())


def test_an_object_of_the_start_stays_the_same_one() -> None:
    """An attribute that refers to another object of the script refers to it again, with what has changed in it."""
    net: Any = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.stage = net.stages[1]
    net.stage.total = 7.0
    net.stages.append(Meter(3.0))
    again: Any = resumed(attributes.changed(), Net())
    assert again.stage is again.stages[1] and [one.total for one in again.stages] == [1.0, 7.0, 3.0]


def test_a_module_without_parameters_may_be_replaced() -> None:
    """A training that changes its activation has the new one after a restart."""
    net = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.act = nn.LeakyReLU(0.3)
    again: Any = resumed(attributes.changed(), Net())
    assert isinstance(again.act, nn.LeakyReLU) and again.act.negative_slope == 0.3 and again.act.training


class Logger:
    """Cannot be created again: nothing says what its function was."""

    def __init__(self) -> None:
        self.count, self.write = 0, lambda: None


def test_what_cannot_be_created_again_is_told_once() -> None:
    """Objects that stay: of a local class, with a function, or with the parameters of the model."""

    class Local:
        count = 0

    net: Any = Net()
    for number, made in enumerate((Local(), Logger(), Frozen(0.0, [*net.body.parameters()]))):
        net.best = None
        attributes = ChangedAttributes()
        attributes.begin({"net": net})
        net.best = made
        attributes.changed()
        with pytest.warns(CheckpointWarning, match=r"net\.best: created by the training.*before restore\(\)") as told:
            attributes.changed()
            attributes.changed()
        assert len(told) == 1, number


@pytest.mark.filterwarnings("error")
def test_what_each_step_creates_again_is_not_told() -> None:
    """Nor at a restart. Nor is an object told that the script's own start creates again; it is then filled."""
    net: Any = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    for _ in range(3):
        net.best = Logger()
        assert resumed(attributes.changed(), Net()).best is None
    net.best = None
    net.best, net.copies = Logger(), [torch.distributions.Normal(0.0, 1.0)]
    net.best.count = 5
    saved = attributes.changed()
    again: Any = Net()
    attributes.begin({"net": again})
    again.best = Logger()
    attributes.restore(saved)
    assert again.best.count == 5 and callable(again.best.write)


def test_another_script_resumes() -> None:
    """If the script has removed a class, the restore warns, and the attribute keeps the value of the script's start."""
    net: Any = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.best, net.stage = Meter(3.0), Phase.MAIN
    saved = attributes.changed()
    text = repr(saved["values"]).replace("'Meter'", "'Gone'")
    with pytest.warns(CheckpointWarning, match=r"net\.best: cannot be restored: .*Gone is not a class"):
        again: Any = resumed({**saved, "values": eval(text)}, Net())
    assert again.best is None and again.stage is Phase.MAIN


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "torch.load", "builtins.eval", "pathlib.Path"])
def test_a_checkpoint_makes_nothing_of_libraries(name: str) -> None:
    """A restore refuses functions and classes of libraries, so a forged checkpoint cannot call them."""
    module, _, last = name.rpartition(".")
    for tree in (["name", module, last], ["object", module, last, True, []], ["items", [module, last], [], None, []]):
        saved = {
            "values": {"net": {"best": tree}},
            "made": {"net": ["best"]},
            "apart": {},
            "generators": {},
            "modes": {},
        }
        with pytest.warns(CheckpointWarning, match=r"net\.best: cannot be restored"):
            again: Any = resumed(saved, Net())
        assert again.best is None


class Notes:
    """Of a class of the script, with what cannot be stored."""

    def __init__(self) -> None:
        self.write = lambda: None


@pytest.mark.filterwarnings("error")
def test_what_hooks_set_at_each_start_is_not_told() -> None:
    """Data and other objects of frameworks, and a list to which each step adds new objects."""
    net: Any = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.best, outputs = Data(), net.copies
    for _ in range(3):
        outputs.clear()
        outputs.append(Notes())
        attributes.changed()


def test_an_object_is_told_at_the_first_save() -> None:
    """If steps without a save come before it."""
    net: Any = Net()
    tracked = Tracked({"net": net})
    tracked.begin()
    net.best = Notes()
    tracked.look()
    with pytest.warns(CheckpointWarning, match=r"net\.best: created by the training.*attribute write \(function\)"):
        tracked.capture(2)
