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
from mizzen.checkpoint.marks import MOST_BYTES
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


def test_a_large_cache_is_left_out(tmp_path: Path) -> None:
    """What a module keeps does not make checkpoints much larger, and is named; small values beside it are saved."""
    net = Net()
    checkpointer = begun(net, tmp_path)
    net.hidden = torch.ones(MOST_BYTES // 4 + 1)  # type: ignore[assignment]
    net.pairs = [(1, 2.0)] * 20_001
    net.losses = [0.5] * 20_001
    net.steps = 3
    with pytest.warns(CheckpointWarning, match=r"^net\.pairs, net\.hidden: the training changes this") as told:
        checkpointer.step(1)
        net.pairs.append((1, 2.0))
        checkpointer.step(2)
    assert len(told) == 1
    again = Net()
    again.losses, again.pairs = [], []
    begun(again, tmp_path)
    assert again.hidden is None and again.steps == 3 and again.losses == net.losses and again.pairs == []


@pytest.mark.filterwarnings("error")
def test_activations_and_caches_of_data_are_left_out_without_a_warning(tmp_path: Path) -> None:
    """Each step computes the former again, and a dataset the latter."""
    net, loader = Net(), ResumableLoader(Data(), batch_size=2)
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(net=net, loader=loader)
    checkpointer.restore()
    net.hidden = net.layer.weight.sum() * torch.ones(MOST_BYTES // 4 + 1)  # type: ignore[assignment]
    loader.dataset.cache, loader.dataset.pairs = torch.ones(MOST_BYTES // 4 + 1), [()] * 20_001  # type: ignore
    checkpointer.step(1)


@pytest.mark.parametrize("size", [7, 1_000, 3_000_000])
def test_a_change_that_torch_does_not_count_is_seen(size: int) -> None:
    """A change through `data` is not in the version of a tensor: in the middle of it, or of all of a large one."""
    net = nn.Linear(1, 1)
    net.mean, net.other = torch.zeros(size + 1)[1:], torch.zeros(size, dtype=torch.uint8)  # type: ignore[assignment]
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    assert attributes.changed() == {}
    net.mean.data[1:-1].add_(1.0)
    assert list(attributes.changed()["values"]["net"]) == ["mean"]
    attributes.begin({"net": net})
    net.other.data[1 : -1 if size > 1_000 else 2].add_(1)
    assert list(attributes.changed()["values"]["net"]) == ["other"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.quantize_per_tensor(torch.zeros(9), 0.1, 0, torch.qint8),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.zeros(1).expand(10**11),
        torch.zeros(1000, 1000).T,
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(0),
    ],
    ids=["quantised", "sparse", "meta", "expanded", "transposed", "conjugate", "empty"],
)
def test_any_tensor_is_compared(tensor: torch.Tensor) -> None:
    """A tensor whose bytes cannot be viewed is left out; one that is expanded is not copied."""
    net = nn.Linear(1, 1)
    net.odd, net.steps = tensor, 0  # type: ignore[assignment]
    attributes = ChangedAttributes()
    attributes.begin({"net": net})
    net.steps = 1  # type: ignore[assignment]
    assert attributes.changed()["values"] == {"net": {"steps": 1}}


class Lookahead(torch.optim.SGD):
    """Has private attributes of its own, beside those of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self._count, self._slow = 0, [torch.zeros(1)]

    def step(self, closure: Any = None) -> Any:
        """Count."""
        self._count += 1
        self._slow[0].add_(2.0)
        return super().step(closure)


def raise_rate(optimizer: Any) -> None:
    """Sets a private attribute from outside."""
    optimizer._raised = True


def test_private_attributes_of_own_optimizers(tmp_path: Path) -> None:
    """Attributes that the script's code sets are saved; attributes that only torch's code uses are not."""
    found = []
    for _ in range(2):
        net = nn.Linear(1, 1)
        optimizer = Lookahead(net.parameters())
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        checkpointer.track(net=net, optimizer=optimizer)
        step = checkpointer.restore()
        own = optimizer._count, optimizer._slow[0].item(), getattr(optimizer, "_raised", False)
        found.append((own, getattr(optimizer, "_zero_grad_profile_name", None)))
        optimizer.step()
        raise_rate(optimizer)
        optimizer._zero_grad_profile_name = "other"
        checkpointer.step(step + 1)
    assert found[0][0] == (0, 0.0, False) and found[1][0] == (1, 2.0, True)
    assert found[0][1] == found[1][1]


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


def test_each_change_of_an_array_or_a_list_is_seen() -> None:
    """Also in the middle of a long one, and a change of order."""
    for change in range(3):
        net = nn.Linear(1, 1)
        net.scores, net.order, net.losses = np.zeros(50_000), np.arange(50_000), [0.0] * 10_000  # type: ignore
        attributes = ChangedAttributes()
        attributes.begin({"net": net})
        if change == 0:
            net.scores[1] = 1.0  # type: ignore
        elif change == 1:
            net.order[[1, 2]] = 2, 1  # type: ignore
        else:
            net.losses[5_000] = 1.0  # type: ignore
        assert list(attributes.changed()["values"]["net"]) == [("scores", "order", "losses")[change]]


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
