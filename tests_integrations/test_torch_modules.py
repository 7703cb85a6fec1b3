"""Tests of tracked modules, optimizers and schedulers of torch, and of loading into live models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mizzen.checkpoint import Checkpointer, CheckpointSettings, StateError, Tracked
from mizzen.checkpoint.parts import decode
from tests_integrations.tensors import bits, content, loadable


class Scaled(nn.Module):
    """A module whose version 2 stores the scale as a factor, and version 1 as a percentage."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}scale"] = state_dict[f"{prefix}scale"] / 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


@pytest.mark.parametrize("version", [1, 2])
def test_states_of_modules_keep_their_version(version: int) -> None:
    """A module migrates a state of an older version and does not change one of its own version, as with torch.save."""
    state = nn.Sequential(Scaled()).state_dict()
    state._metadata["0"]["version"] = version  # type: ignore[attr-defined]
    if version == 1:
        state["0.scale"] = torch.tensor(50.0)
    model = nn.Sequential(Scaled())
    model.load_state_dict(decode("tensors", content(state)))
    assert float(model[0].scale) == 0.5


def a_training(seed: int) -> dict[str, Any]:
    """Returns torch objects of all kinds that have a state."""
    torch.manual_seed(seed)
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedulers = {
        "warm": torch.optim.lr_scheduler.LinearLR(optimizer),
        "stones": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        "sequence": torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
    }
    scaler = torch.amp.GradScaler("cpu")
    return {
        "model": model, "optimizer": optimizer, "average": average, "scaler": scaler,
        "dice": torch.Generator().manual_seed(seed), **schedulers,
    }  # fmt: skip


def train(objects: dict[str, Any], steps: int) -> list[float]:
    """Makes `steps` steps with all objects. Returns the losses, random numbers and learning rates."""
    losses = []
    for _ in range(steps):
        inputs = torch.randn(8, 4, generator=objects["dice"])
        loss = objects["model"](inputs).square().mean()
        objects["optimizer"].zero_grad()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()
        objects["average"].update_parameters(objects["model"])
        for name in ("warm", "stones", "cosine", "sequence"):
            objects[name].step()
        objects["plateau"].step(loss.item())
        losses += [loss.item(), torch.rand(1).item(), objects["optimizer"].param_groups[0]["lr"]]
    return losses


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchs_own_objects_go_on_exactly() -> None:
    """Models, optimizers, schedulers, scaler, averages and generators resume exactly."""
    first, second = a_training(1), a_training(2)
    tracked, fresh = Tracked(first), Tracked(second)
    train(first, 3)
    state = {name: decode(*loadable(name, value)) for name, value in tracked.capture(3).items()}
    assert not any(name.startswith("_orig_mod") for name in state["model"])
    expected = train(first, 6)
    fresh.restore(state)
    assert train(second, 6) == expected
    assert second["stones"].milestones.elements is not None


class Block(nn.Module):
    """A module with layers of odd sizes, tied weights and buffers."""

    def __init__(self, ends: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 7)
        self.second.weight = nn.Parameter(self.first.weight.t().contiguous())
        self.tied = nn.Linear(7, 5)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(7)
        self.large = nn.Linear(7, 1_000_003)
        self.end = nn.Linear(7, ends)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.norm(self.second(self.first(x))))


def test_what_is_loaded_is_aligned_as_torchs_own(tmp_path: Path) -> None:
    """Loaded tensors of any size are aligned to 64 bytes, so a model with them computes bit-identical results."""
    torch.manual_seed(1)
    model = Block()
    Checkpointer(tmp_path).save(1, {"model": model.state_dict()})
    found = Checkpointer(tmp_path).load_latest()
    assert found is not None
    assert {tensor.data_ptr() % 64 for tensor in found.state["model"].values()} == {0}
    again = Block()
    again.load_state_dict(found.state["model"], assign=True)
    x = torch.randn(9, 7)
    assert bits(again.eval()(x)) == bits(model.eval()(x))


def test_a_live_model_is_read_into(tmp_path: Path) -> None:
    """A restore reads values into the memory of the live parameters. A damaged part does not overwrite them."""
    torch.manual_seed(1)
    model = Block()
    saver = Checkpointer(tmp_path, keep=2)
    saver.track(model=model)
    for step in (1, 2):
        with torch.no_grad():
            model.end.weight += 1
        saver.save(step, {**Tracked({"model": model}).capture(step)})
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    fresh = Block()
    places = {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()}
    reader = Checkpointer(tmp_path, settings=CheckpointSettings(rank=1, world_size=2))
    reader.track(model=fresh)
    assert reader.restore() == 2
    assert {name: bits(tensor) for name, tensor in fresh.state_dict().items()} == expected
    assert {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()} == places
    [newest] = [part for part in saver_parts(tmp_path) if "step-0000000002" in part.parts[-2]]
    raw = bytearray(newest.read_bytes())
    raw[-1] ^= 1
    newest.write_bytes(raw)
    reader = Checkpointer(tmp_path, settings=CheckpointSettings(rank=1, world_size=2))
    reader.track(model=fresh)
    with pytest.warns(match="step-0000000002.* is skipped"):
        assert reader.restore() == 1
    assert not torch.equal(fresh.end.weight, model.end.weight)


def saver_parts(root: Path) -> list[Path]:
    """Returns the files of the part `model` in a root."""
    return sorted(root.rglob("part-model.safetensors"))


class Halves(nn.Module):
    """A module with its own load: it converts the weight, and it never loads the table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.register_buffer("table", torch.arange(8.0))
        self.inner = nn.Linear(2, 2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 1000
        state_dict[prefix + "table"] = self.table
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_loads_its_own_way_does(tmp_path: Path) -> None:
    """Values that a module converts or ignores, and shared memory, are not read in place. Other shapes are errors."""
    saved = Halves()
    with torch.no_grad():
        saved.weight.fill_(2.0)
        saved.table.fill_(-1.0)
    Checkpointer(tmp_path / "own").save(1, Tracked({"model": saved}).capture(1))
    live = Halves()
    reader = Checkpointer(tmp_path / "own", settings=CheckpointSettings(rank=1, world_size=2))
    reader.track(model=live)
    assert reader.restore() == 1
    assert live.weight.tolist() == [2000.0] * 8 and live.table.tolist() == list(range(8))
    assert torch.equal(live.inner.weight, saved.inner.weight)

    base = torch.arange(12.0)
    views = nn.ParameterDict({"low": nn.Parameter(base[:8]), "high": nn.Parameter(base[4:])})
    apart = nn.ParameterDict({"low": nn.Parameter(torch.zeros(8)), "high": nn.Parameter(torch.ones(8))})
    Checkpointer(tmp_path / "views").save(1, Tracked({"model": apart}).capture(1))
    reader = Checkpointer(tmp_path / "views", settings=CheckpointSettings(rank=1, world_size=2))
    reader.track(model=views)
    assert reader.restore() == 1
    # The result of load_state_dict, which copies in the order of the module's keys.
    expected = torch.arange(12.0)
    for name in views:
        target = expected[:8] if name == "low" else expected[4:]
        target.copy_(apart[name].detach())
    assert torch.equal(base, expected)

    Checkpointer(tmp_path / "shape").save(1, Tracked({"model": Block(ends=3)}).capture(1))
    other = Block(ends=4)
    before = bits(other.end.weight)
    reader = Checkpointer(tmp_path / "shape", settings=CheckpointSettings(rank=1, world_size=2))
    reader.track(model=other)
    with pytest.raises(RuntimeError, match="size mismatch for end"):
        reader.restore()
    assert bits(other.end.weight) == before

    # Rejected by the names of the parts, before any value is changed.
    same = Block(ends=3)
    before = bits(same.first.weight)
    reader = Checkpointer(tmp_path / "shape", settings=CheckpointSettings(rank=1, world_size=2))
    reader.track(model=same, more={"a": 1})
    with pytest.raises(StateError, match="lacks the tracked parts 'more'"):
        reader.restore()
    assert bits(same.first.weight) == before
