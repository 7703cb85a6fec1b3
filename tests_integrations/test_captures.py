"""What a capture of torch objects must not miss: gradients that are still needed, and changed strides."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from mizzen.checkpoint import Checkpointer, CheckpointWarning, open_checkpoints


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_that_are_accumulated_over_a_checkpoint_are_told(
    tmp_path: Path, accumulates: bool, set_to_none: bool
) -> None:
    """One warning if a step lies between two backward passes of one update; none if the gradients are cleared first."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(model=model, optimizer=optimizer)
    step = checkpointer.restore()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CheckpointWarning)
        while step < 6:
            if not accumulates or step % 2 == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.ones(3, 4)).pow(2).sum().backward()
            if not accumulates or step % 2:
                optimizer.step()
            step += 1
            checkpointer.step(step)
    found = [str(warning.message) for warning in said if issubclass(warning.category, CheckpointWarning)]
    assert len(found) == int(accumulates)
    assert not accumulates or "part 'model': the training adds to gradients that were there at step 1" in found[0]


def test_a_transposed_tensor_is_stored_as_it_is(tmp_path: Path) -> None:
    """Among many tensors, one with the same memory and shape as at the previous save, but other strides, is exact."""
    square = torch.arange(400.0).view(20, 20)
    state = {f"t{index}": torch.ones(3) * index for index in range(80)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"p": {**state, "a": square, "b": square}})
    checkpointer.save(2, {"p": {**state, "a": square, "b": square.t()}})
    found = open_checkpoints(tmp_path).load(2).state["p"]
    assert torch.equal(found["b"], square.t()) and torch.equal(found["a"], square)


def test_what_a_training_unfreezes_stays_so_after_a_restart(tmp_path: Path) -> None:
    """As `if epoch == 2: unfreeze(body)`, which a restart at epoch 3 does not execute again."""

    def start(*frozen: str) -> tuple[nn.Sequential, Checkpointer, int]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        checkpointer.track(model=model)
        return model, checkpointer, checkpointer.restore()

    def trained(model: nn.Sequential) -> list[str]:
        return [name for name, one in model.named_parameters() if one.requires_grad]

    model, checkpointer, step = start("0")
    checkpointer.step(step + 1)
    model[0].weight.requires_grad_(True)
    checkpointer.step(step + 2)
    model, checkpointer, step = start("0")
    assert (step, trained(model)) == (2, ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"])
    checkpointer.step(3)
    # Another script freezes more: only what the training has changed is restored.
    model, checkpointer, step = start("0", "1")
    assert (step, trained(model)) == (3, ["0.weight", "2.weight", "2.bias"])
    model[0].weight.requires_grad_(False)
    checkpointer.step(4)
    assert trained(start("0", "1")[0]) == ["2.weight", "2.bias"]
