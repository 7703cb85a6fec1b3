"""Tests of plain attributes that a training changes: they are saved and restored, and only these."""

import importlib
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from mizzen import Checkpointer
from mizzen.checkpoint import CheckpointWarning, StateError, Tracked
from mizzen.checkpoint.attributes import ATTRIBUTES, ChangedAttributes
from mizzen.integrations.torch import ResumableLoader


class Meter:
    """A mean, as scripts write it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


class Phase(Enum):
    """What a training does now."""

    WARM, MAIN = 1, 2


class Net(nn.Module):
    """A module with a state of many kinds outside its `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.1)
        self.steps, self.tau, self.kind, self.hidden = 0, 1.0, "plain", None
        self.history: deque[Any] = deque(maxlen=3)
        self.sums, self.shadow = {"loss": 0.0}, {"w": torch.zeros(3)}
        self.meter, self.teacher, self.same = Meter(), [nn.Linear(3, 3)], [self.layer]
        self.numbers, self.generator = np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.array = np.zeros(3)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.weight_of_layer = self.layer.weight.detach()
        self.where, self.phase = Path("here"), Phase.WARM


def train(net: Net) -> None:
    """Changes all of the state."""
    net.steps, net.tau, net.kind, net.hidden = 7, 0.5, "sharp", (torch.ones(2, 3), torch.ones(1))  # type: ignore[assignment]
    net.history.extend([torch.tensor(1.0), 2, "x", torch.tensor(3.0)])
    net.sums["loss"] += 2.5
    net.shadow["w"].add_(1.0)
    net.meter.total, net.meter.count = 3.5, 4
    with torch.no_grad():
        net.layer.weight.add_(1.0)
    for tensor in net.teacher[0].parameters():
        tensor.data.mul_(2.0)
    net.numbers.random(), torch.rand(1, generator=net.generator)
    net.array += 1.0
    net.cache.add_(2.0)
    net.drop.p, net.phase = 0.3, Phase.MAIN
    net.drop.eval()


def seen(net: Net) -> list[Any]:
    """Returns the state outside the `state_dict`, to compare it."""
    hidden = None if net.hidden is None else [one.tolist() for one in net.hidden]
    return [
        net.steps, net.tau, net.kind, hidden, [float(one) if one != "x" else one for one in net.history],
        net.history.maxlen, dict(net.sums), net.shadow["w"].tolist(), net.meter.total, net.meter.count,
        [tensor.tolist() for tensor in net.teacher[0].parameters()], net.numbers.bit_generator.state,
        net.generator.get_state().tolist(), net.array.tolist(), net.cache.tolist(), net.drop.p, net.drop.training,
        net.training, net.layer.weight.tolist(), net.phase,
    ]  # fmt: skip


def begun(net: nn.Module, root: Path) -> Checkpointer:
    """Returns a checkpointer that has restored a module."""
    checkpointer = Checkpointer(root, interval_s=0)
    checkpointer.track(net=net)
    checkpointer.restore()
    return checkpointer


def test_all_that_has_changed_is_restored(tmp_path: Path) -> None:
    """Numbers, tensors, containers, arrays, generators, objects, hidden modules, buffers and modes; also twice."""
    torch.manual_seed(0)
    net = Net()
    start = seen(net)
    checkpointer = begun(net, tmp_path)
    train(net)
    checkpointer.step(1)
    for _ in range(2):
        torch.manual_seed(0)
        again = Net()
        assert seen(again) == start
        next_one = begun(again, tmp_path)
        assert seen(again) == seen(net)
        # Aliases stay.
        assert again.same[0] is again.layer
        assert again.weight_of_layer.data_ptr() == again.layer.weight.data_ptr()
        next_one.step(2)


def test_an_object_that_was_replaced_is_not_filled(tmp_path: Path) -> None:
    """The script may hold the object of the start elsewhere, as in a list of stages."""

    @dataclass(frozen=True)
    class Stage:
        name: str
        noise: float

    for start in range(2):
        stages, net = [Stage("warm", 0.1), Stage("main", 0.5)], nn.Linear(1, 1)
        net.stage = stages[0]  # type: ignore[assignment]
        checkpointer = begun(net, tmp_path)
        assert net.stage == stages[start] and stages[0] == Stage("warm", 0.1)
        net.stage = stages[1]  # type: ignore[assignment]
        checkpointer.step(start + 1)


def test_what_has_not_changed_is_not_saved(tmp_path: Path) -> None:
    """A script may be started with other options, so only changes are saved; without one, there is no part."""
    net = Net()
    checkpointer = begun(net, tmp_path)
    with torch.no_grad():
        net.layer.weight.add_(1.0)
    checkpointer.step(1)
    found = Checkpointer(tmp_path).load_latest()
    assert found is not None and ATTRIBUTES not in found.state
    other = Net()
    other.drop.p, other.tau = 0.9, 3.0
    begun(other, tmp_path)
    assert (other.drop.p, other.tau) == (0.9, 3.0)


def test_what_cannot_be_stored_is_left_out(tmp_path: Path) -> None:
    """Locks, functions, paths and views of parameters do not fail a save."""
    net = Net()
    checkpointer = begun(net, tmp_path)
    net.hidden, net.where, net.steps = lambda: 1, Path("there"), 2  # type: ignore[assignment]
    net.tau = net.layer.weight[0]  # type: ignore[assignment]
    net.kind = [object()]  # type: ignore[assignment]
    checkpointer.step(1)
    again = Net()
    begun(again, tmp_path)
    assert again.steps == 2 and again.tau == 1.0 and again.hidden is None


def test_optimizers_and_metrics(tmp_path: Path) -> None:
    """The attributes of an optimizer of the script, and the sums of torchmetrics."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Slow(torch.optim.SGD):
        count = 0

    def make() -> tuple[Any, Any]:
        metric = torchmetrics.MeanMetric()
        optimizer = Slow([nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer.count, optimizer.slow = 0, [torch.zeros(1)]  # type: ignore[attr-defined]
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        checkpointer.track(metric=metric, optimizer=optimizer)
        checkpointer.restore()
        return (metric, optimizer), checkpointer

    (metric, optimizer), checkpointer = make()
    metric.update(torch.tensor([1.0, 2.0, 6.0]))
    optimizer.count = 5
    optimizer.slow[0].add_(1.0)
    checkpointer.step(1)
    (metric, optimizer), _ = make()
    assert (float(metric.compute()), optimizer.count, optimizer.slow[0].tolist()) == (3.0, 5, [1.0])


class Data(Dataset[Any]):
    """A dataset with an attribute that the training changes, and a generator, which its loader saves."""

    def __init__(self) -> None:
        self.difficulty, self.noise = 0.0, np.random.default_rng(1)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return self.difficulty + float(self.noise.random())


def test_a_look_sees_a_dataset_as_at_the_start(tmp_path: Path) -> None:
    """The attributes of a dataset are set when the loader resumes: a look before it gets what it got at first."""
    batches = []
    for start in range(2):
        loader = ResumableLoader(Data(), batch_size=2)
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        net = nn.Linear(1, 1)
        checkpointer.track(net=net, loader=loader)
        checkpointer.restore()
        look = next(iter(loader)).tolist()
        for number, batch in enumerate(loader, loader.used):
            batches.append((look, batch.tolist()))
            loader.dataset.difficulty += 1.0  # type: ignore[attr-defined]
            with torch.no_grad():
                net.weight.add_(1.0)
            if not start:
                checkpointer.step(number + 1)
                if number == 1:
                    break
    looks = [look for look, _ in batches]
    assert looks == [looks[0]] * len(looks)
    assert [int(batch[0]) for _, batch in batches] == [0, 1, 2]


def test_the_name_of_the_part_is_taken() -> None:
    """A script cannot track an object under the name of the part."""
    with pytest.raises(StateError, match="'attributes' is saved by mizzen itself"):
        Tracked({ATTRIBUTES: {}})


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_compiled_module_is_tracked() -> None:
    """Modules of TorchScript have no attributes in Python: they are tracked without them, also inside others."""
    script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    for module in (script, nn.Sequential(script, nn.Dropout(0.1))):
        tracked = Tracked({"net": module})
        tracked.begin()
        module.eval()
        tracked.restore(tracked.capture(1))


def test_a_restored_value_is_not_changed_by_the_script() -> None:
    """Attributes are restored again when an epoch resumes: what its start has changed in place must not remain."""
    net = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.hidden, net.extra = torch.ones(2), {"sums": [1.0]}  # type: ignore[assignment]
    saved = attributes.changed()
    again = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": again})
    attributes.restore(saved)
    again.hidden.zero_()  # type: ignore[attr-defined]
    again.extra["sums"].clear()  # type: ignore[operator,union-attr,index]
    attributes.restore(saved)
    assert again.hidden.tolist() == [1.0, 1.0] and again.extra == {"sums": [1.0]}  # type: ignore[attr-defined]


def test_a_script_with_another_generator_or_buffer_resumes() -> None:
    """A restore does not fail, and does not hide a buffer or a module, if the script has changed."""
    net = Net()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.numbers.random(), torch.rand(1, generator=net.generator)
    net.hidden, net.kind, net.steps = torch.ones(2), "sharp", 3  # type: ignore[assignment]
    saved = attributes.changed()
    other = Net()
    other.numbers, other.generator = torch.Generator().manual_seed(5), Random(5)  # type: ignore[assignment]
    del other.hidden, other.kind
    other.register_buffer("hidden", torch.zeros(2), persistent=False)
    other.kind = nn.Linear(1, 1)  # type: ignore[assignment]
    attributes.begin({"net": other})
    with pytest.warns(CheckpointWarning, match=r"net\.(numbers|generator): the saved state"):
        attributes.restore(saved)
    assert other.steps == 3 and other.hidden.tolist() == [0.0, 0.0] and isinstance(other.kind, nn.Linear)


def test_tensors_are_restored_on_their_devices() -> None:
    """A tensor returns to the module's device if it was on it, else to the CPU. `meta` stands for a GPU."""
    net = nn.Linear(1, 1)
    net.on, net.recent, net.beside = {}, None, []  # type: ignore[assignment]
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.on["h"], net.recent = torch.ones(1), deque([torch.ones(1)])  # type: ignore
    saved = attributes.changed()
    again = nn.Linear(1, 1, device="meta")
    again.on, again.recent, again.beside = {}, None, []  # type: ignore[assignment]
    attributes.begin({"net": again})
    attributes.restore(saved)
    assert (again.on["h"].device.type, again.recent[0].device.type) == ("meta", "meta")  # type: ignore
    again.beside.append(torch.ones(1))  # type: ignore
    saved = attributes.changed()
    last = nn.Linear(1, 1, device="meta")
    last.beside = []  # type: ignore[assignment]
    attributes.begin({"net": last})
    attributes.restore({**saved, "values": {"net": {"beside": saved["values"]["net"]["beside"]}}})
    assert last.beside[0].device.type == "cpu"  # type: ignore


def test_objects_of_libraries_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of libraries in a user's folder or in PYTHONPATH, whose inner state is not the script's."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "foreign_meter.py").write_text("class Meter:\n    total = 0\n    def __init__(self): self.fd = 1\n")
    monkeypatch.syspath_prepend(str(folder))
    net = nn.Linear(1, 1)
    net.meter = importlib.import_module("foreign_meter").Meter()
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.meter.fd = 5  # type: ignore
    assert attributes.changed() == {}


def test_a_second_restore_in_a_process(tmp_path: Path) -> None:
    """A script that goes back to a checkpoint, as after a loss that is not a number, saves what has changed then."""
    net = Net()
    checkpointer = begun(net, tmp_path)
    checkpointer.step(1)
    net.steps, net.kind = 100, "sharp"
    net.history.append(1)
    checkpointer.restore()
    assert (net.steps, net.kind) == (0, "plain")
    net.steps = 100
    checkpointer.step(2)
    again = Net()
    begun(again, tmp_path)
    assert (again.steps, again.kind, list(again.history)) == (100, "plain", [1])


def test_a_profiler_may_run_the_script(tmp_path: Path) -> None:
    """Its file is that of the module `__main__`, but the classes there are the script's own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from torch import nn\n"
        "from mizzen import Checkpointer\n"
        "class Meter:\n"
        "    total = 0.0\n"
        "net, checkpointer = nn.Linear(1, 1), Checkpointer('ckpt')\n"
        "net.meter = Meter()\n"
        "checkpointer.track(net=net)\n"
        "if (step := checkpointer.restore()) == 0:\n"
        "    net.meter.total = 3.5\n"
        "    checkpointer.step(1)\n"
        "    checkpointer.wait()\n"
        "print(step, net.meter.total)\n"
    )
    for said in ("0 3.5", "1 3.5"):
        command = [sys.executable, "-m", "cProfile", "-o", "profile", str(script)]
        variables = {"MIZZEN_CHECKPOINT_INTERVAL_S": "0"}
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, check=True, timeout=80
        )
        assert done.stdout.splitlines() == [said]
