"""Tensors in tracked dicts are filled in place."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from mizzen.checkpoint import Checkpointer, CheckpointWarning, Tracked, open_checkpoints


def test_an_average_that_the_script_also_holds_goes_on(tmp_path: Path) -> None:
    """An EMA under a name of the script is exact after a restore, and so are the later checkpoints."""

    def run(root: Path, stop: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        ema = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        checkpointer = Checkpointer(root, interval_s=0)
        checkpointer.track(model=model, optimizer=optimizer, extra={"ema": ema, "best": 0.0})
        step = checkpointer.restore()
        while step < (stop or 10):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
            for name, tensor in model.state_dict().items():
                ema[name].mul_(0.9).add_(tensor, alpha=0.1)
            step += 1
            checkpointer.step(step)
        return ema["weight"], model.weight.detach()

    expected = run(tmp_path / "straight", None)
    run(tmp_path / "killed", 5)
    found = run(tmp_path / "killed", None)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    saved = open_checkpoints(tmp_path / "killed").load(10).state["extra"]["ema"]["weight"]
    assert torch.equal(saved, expected[0])


def test_tensors_that_do_not_fit_are_replaced() -> None:
    """Another shape, shared elements, and a view of a tracked model are not filled; parameters are."""
    model = nn.Linear(2, 2)
    held, wide, leaf = torch.zeros(3), torch.zeros(1).expand(4), nn.Parameter(torch.zeros(2))
    table = {"held": held, "best": model.state_dict(), "leaf": leaf, "wide": wide}
    one = Tracked({"model": model, "table": table})
    new = {"held": torch.ones(4), "best": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}
    state = one.capture(1)
    state["table"] = {**new, "leaf": torch.ones(2), "wide": torch.arange(4.0)}
    with pytest.warns(CheckpointWarning) as said:
        one.restore(state)
    assert sorted(str(warning.message).split(":")[0] for warning in said) == ["table/held", "table/wide"]
    assert table["leaf"] is leaf and leaf.tolist() == [1, 1] and leaf.requires_grad
    assert not torch.equal(model.weight, torch.ones(2, 2)) and torch.equal(table["best"]["weight"], torch.ones(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.restore(one.capture(1))
