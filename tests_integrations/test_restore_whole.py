"""A restore of torch objects changes all of them or none, also where a module is read in place."""

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    Tracked,
    module_layout,
    trees,
    verified_part,
)
from tests_integrations.tensors import bits


def objects(seed: int, width: int = 96) -> dict[str, Any]:
    """Returns a model with hidden memory of several sizes, an optimizer with a state, and a generator."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 1000))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "dice": torch.Generator().manual_seed(seed)}


def picture(one: Tracked) -> list[Any]:
    """Returns the bits of all tensors, the moments of the optimizer, and the random generators."""
    model, optimizer, dice = (one._parts[name][0]() for name in ("model", "optimizer", "dice"))
    moments = [bits(tensor) for state in optimizer["state"].values() for tensor in state.values()]
    return [{name: bits(t) for name, t in model.items()}, moments, bits(dice), bits(torch.get_rng_state())]


def checkpointer_of(root: Path, **found: Any) -> Checkpointer:
    """Returns a checkpointer that only loads, with tracked objects."""
    checkpointer = Checkpointer(root, settings=CheckpointSettings(rank=1, world_size=2))
    checkpointer.track(**found)
    return checkpointer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a root with a checkpoint of step 3."""
    Checkpointer(tmp_path).save(3, Tracked(objects(1)).capture(3))
    return tmp_path


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("fails", ["once", "for good"])
def test_whichever_read_fails_nothing_is_changed_in_part(
    root: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool, fails: str
) -> None:
    """After an error the objects are as before. A second read is repeated; if it fails for good, the process ends."""
    monkeypatch.setattr(verified_part, "IN_PLACE_BYTES", 0 if in_place else 1 << 40)
    real, count, limit = os.preadv, 0, 0

    def read(*given: Any) -> int:
        nonlocal count
        count += 1
        if count == limit or (count > limit and fails == "for good"):
            raise PermissionError(errno.EACCES, "no")
        return real(*given)

    monkeypatch.setattr(os, "preadv", read)
    ends = 0
    for limit in range(1, 1000):
        checkpointer = checkpointer_of(root, **objects(2))
        before = picture(checkpointer._tracked)
        count = 0
        try:
            assert checkpointer.restore() == 3
        except CheckpointError:
            assert picture(checkpointer._tracked) == before
        except SystemExit as error:
            assert "could not be read again" in str(error)
            ends += 1
        else:
            assert picture(checkpointer._tracked) == picture(Tracked(objects(1)))
            if count < limit:
                break
    assert (ends > 0) == (in_place and fails == "for good")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_flipped_bit_stays_out_of_the_model(root: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """A script that catches the error of a damaged checkpoint has its own weights."""
    monkeypatch.setattr(verified_part, "IN_PLACE_BYTES", 0 if in_place else 1 << 40)
    [path] = root.rglob("part-model.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x40
    path.write_bytes(content)
    checkpointer = checkpointer_of(root, **objects(2))
    before = picture(checkpointer._tracked)
    with warnings.catch_warnings(), pytest.raises(CheckpointError, match="does not match its checksum"):
        warnings.simplefilter("ignore")
        checkpointer.restore()
    assert picture(checkpointer._tracked) == before


def test_another_architecture_changes_nothing(root: Path) -> None:
    """If the model or only the optimizer does not fit, torch's error is raised, and all objects are as they were."""
    other = objects(2, width=32)
    fitting = objects(2)
    parameters = [*fitting["model"].parameters()]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    for found, error in (
        (other, RuntimeError),
        ({**fitting, "optimizer": torch.optim.Adam(groups)}, ValueError),
    ):
        checkpointer = checkpointer_of(root, **found)
        before = picture(checkpointer._tracked)
        with pytest.raises(error):
            checkpointer.restore()
        assert picture(checkpointer._tracked) == before


def test_a_part_is_read_elsewhere_if_it_disappears_between_the_two_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second read uses another root that has the same content."""
    monkeypatch.setattr(verified_part, "IN_PLACE_BYTES", 0)
    near, far = tmp_path / "near", tmp_path / "far"
    Checkpointer(far, local=near).save(3, Tracked(objects(1)).capture(3))
    real = verified_part.verify_part

    def verify(store: Any, part: Any) -> None:
        real(store, part)
        store.delete(part.key)

    monkeypatch.setattr(verified_part, "verify_part", verify)
    checkpointer = Checkpointer(far, local=near, settings=CheckpointSettings(rank=1, world_size=2))
    checkpointer.track(**objects(2))
    assert checkpointer.restore() == 3
    expected = Tracked(objects(1))
    assert picture(checkpointer._tracked)[0] == picture(expected)[0]


class Named(nn.Module):
    """A module with parameters of several types, tied weights if asked, and a version."""

    _version = 3

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.rand(3, 5).bfloat16())
        self.single = nn.Parameter(torch.rand(7))
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("hidden", torch.arange(4), persistent=False)
        self.inner = nn.ModuleDict({"a-b": nn.Linear(2, 3), "c": nn.BatchNorm1d(3)})
        if tied:
            self.again = self.single


def test_the_quick_layout_is_the_exact_one() -> None:
    """The layout that is computed without flattening has the same head and the same tensors."""
    found = 0
    for module in (Named(False), Named(True), nn.Linear(2, 2), nn.ParameterDict({"x/y": nn.Parameter(torch.ones(1))}),
                   nn.Sequential(nn.Linear(3, 3, bias=False), nn.Conv2d(1, 2, 3), nn.Embedding(4, 2))):  # fmt: skip
        state = module_layout.ModuleState(module)()
        assert trees.flatten("p", state).text == trees.flatten("p", module.state_dict()).text
        assert list(state) == list(module.state_dict())
        quick = module_layout.quick_layout("p", module, state)
        exact = module_layout.module_layout(module, trees.flatten("p", state))
        assert exact is not None
        if quick is not None:
            found += 1
            assert (quick.head, quick.size_bytes) == (exact.head, exact.size_bytes)
            places = [[tensor.data_ptr() for tensor in one.tensors] for one in (quick, exact)]
            assert places[0] == places[1]
    assert found == 3
    for module in (nn.Sequential(nn.Linear(2, 2), nn.Flatten()),):
        module[0].register_load_state_dict_pre_hook(lambda *_: None)
        assert module_layout.quick_layout("p", module, module.state_dict()) is None


def test_the_state_of_a_module_that_has_changed_is_that_of_torch() -> None:
    """Names are listed once, but each change of them is seen."""

    def rename(module: Any) -> None:
        module.inner["c"].weight2 = module.inner["c"]._parameters.pop("weight")

    def hook(module: Any) -> None:
        module.register_state_dict_post_hook(
            lambda _, state, prefix, __: state.update({prefix + "more": torch.ones(1)})
        )

    changes = [
        lambda module: None,
        lambda module: setattr(module.inner["a-b"], "bias", None),
        lambda module: setattr(module.inner["a-b"], "bias", nn.Parameter(torch.ones(3))),
        lambda module: setattr(module, "low", nn.Parameter(torch.zeros(2))),
        lambda module: module.inner.update({"d": nn.Linear(1, 1)}),
        lambda module: module.inner.pop("a-b"),
        lambda module: module.register_buffer("counts", torch.ones(1), persistent=False),
        lambda module: setattr(module.inner["c"], "running_mean", None),
        rename,
        lambda module: nn.utils.parametrizations.weight_norm(module.inner["d"]),
        hook,
        lambda module: setattr(module, "state_dict", lambda: {"own": torch.ones(1)}),
    ]
    module = Named(True)
    states = module_layout.ModuleState(module)
    for change in changes:
        change(module)
        for _ in range(2):
            state, expected = states(), module.state_dict()
            assert list(state) == list(expected)
            assert all(torch.equal(state[name], expected[name]) for name in state)
            assert getattr(state, "_metadata", None) == getattr(expected, "_metadata", None)
