"""Private attributes that a script sets on optimizers, whose classes have private attributes of their own."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mizzen import Checkpointer


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


def count_up(optimizer: Any) -> None:
    """Counts in a private attribute."""
    optimizer._counted = getattr(optimizer, "_counted", 0) + 1


def test_private_attributes_of_optimizers_of_torch(tmp_path: Path) -> None:
    """The script may set them in its functions, and in the code that runs at the restore."""
    found = []
    for _ in range(2):
        net = nn.Linear(1, 1)
        optimizer: Any = torch.optim.Adagrad(net.parameters())
        optimizer._here, optimizer._best = 0, None
        checkpointer = Checkpointer(tmp_path, interval_s=0)
        checkpointer.track(net=net, optimizer=optimizer)
        step = checkpointer.restore()
        own = optimizer._here, optimizer._best, getattr(optimizer, "_counted", 0)
        found.append((own, getattr(optimizer, "_zero_grad_profile_name", None)))
        optimizer._here, optimizer._best = 3, {"loss": torch.ones(1)}
        count_up(optimizer)
        vars(optimizer)["_zero_grad" + "_profile_name"] = "other"
        checkpointer.step(step + 1)
    assert found[0][0] == (0, None, 0) and found[1][0] == (3, {"loss": torch.ones(1)}, 1)
    assert found[0][1] == found[1][1]
