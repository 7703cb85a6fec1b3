"""Tests of `verify_resume` with torch objects: it names the first entry that differs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mizzen.checkpoint import ResumeError, verify_resume
from mizzen.integrations.torch import ResumableLoader

Objects = dict[str, Any]
DATA = torch.utils.data.TensorDataset(torch.arange(4800.0).sin().view(240, 20), torch.arange(240) % 3)
TYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8]


class ForgetfulAdam(torch.optim.Adam):
    """An optimizer that resets its averages at a load."""

    def load_state_dict(self, state_dict: Objects) -> None:
        super().load_state_dict(state_dict)
        for averages in self.state.values():
            averages["exp_avg"].zero_()


def make(adam: type[torch.optim.Adam] = torch.optim.Adam, *left_out: str) -> Callable[[], Objects]:
    def made() -> Objects:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 3))
        optimizer = adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": Batches()}
        hidden = {name: objects.pop(name) for name in left_out}
        if hidden:
            # The step uses these objects, but they are not part of the state.
            model.hidden = lambda: hidden
        return objects

    return made


class Batches:
    """A `ResumableLoader` with a method that returns the next batch."""

    def __init__(self) -> None:
        self.loader = ResumableLoader(DATA, batch_size=32, shuffle=True)
        self._batches: Any = None

    def next(self) -> Any:
        while True:
            if self._batches is None:
                self._batches = iter(self.loader)
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None

    def state_dict(self) -> Objects:
        return self.loader.state_dict()

    def load_state_dict(self, state: Objects) -> None:
        self.loader.load_state_dict(state)
        self._batches = None


def train_step(objects: Objects) -> None:
    objects = {**objects, **getattr(objects["model"], "hidden", dict)()}
    inputs, labels = objects["loader"].next()
    objects["optimizer"].zero_grad()
    nn.functional.cross_entropy(objects["model"](inputs), labels).backward()
    objects["optimizer"].step()
    objects["scheduler"].step()


def test_a_sound_training_resumes() -> None:
    """A model with dropout and batch norm, Adam, a scheduler and a loader resume exactly, also as copies of objects."""
    before = torch.get_rng_state()
    verify_resume(train_step, make(), steps=10, before=3)
    objects = make()()
    del objects["loader"], objects["scheduler"]

    def step(objects: Objects) -> None:
        objects["optimizer"].zero_grad()
        nn.functional.cross_entropy(objects["model"](DATA.tensors[0]), DATA.tensors[1]).backward()
        objects["optimizer"].step()

    before = torch.get_rng_state()
    weights = objects["model"][0].weight.clone()
    verify_resume(step, objects, steps=2)
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(objects["model"][0].weight, weights)


def test_the_averages_of_an_optimizer_are_named() -> None:
    """If an optimizer loses a part of its state, the difference is found right after the restore."""
    with pytest.raises(ResumeError, match="elements differ, by") as caught:
        verify_resume(train_step, make(ForgetfulAdam))
    assert (caught.value.path, caught.value.step) == ("optimizer/state/0/exp_avg", 0)


@pytest.mark.parametrize(
    ("left_out", "path", "step"),
    [
        ("optimizer", "model/0.weight", 1),
        ("scheduler", "optimizer/param_groups/0/lr", 1),
        ("loader", "model/0.weight", 1),
    ],
)
def test_what_is_not_tracked_is_found(left_out: str, path: str, step: int) -> None:
    """If an object is left out of the state, the error names the first entry that differs."""
    with pytest.raises(ResumeError) as caught:
        verify_resume(train_step, make(torch.optim.Adam, left_out), steps=5, before=3)
    assert (caught.value.path, caught.value.step) == (path, step)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8], ids=str
)
def test_each_type_is_compared(dtype: torch.dtype) -> None:
    """A changed bit in a tensor of any type is found, and an unchanged tensor passes."""

    def make_with(flips: bool) -> Callable[[], Objects]:
        def made() -> Objects:
            held = {"t": torch.arange(6).to(dtype)}

            def load(state: Objects) -> None:
                held["t"] = state["t"].clone()
                if flips:
                    held["t"].view(torch.uint8)[0] ^= 1

            return {"held": (lambda: dict(held), load)}

        return made

    verify_resume(lambda _: None, make_with(False))
    with pytest.raises(ResumeError, match="right after the restore, first at held/t: "):
        verify_resume(lambda _: None, make_with(True))
