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
