"""Large values among the attributes that a training changes, and changes within large ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mizzen import Checkpointer
from mizzen.checkpoint import CheckpointWarning
from mizzen.checkpoint.attributes import ChangedAttributes
from mizzen.checkpoint.marks import MOST_BYTES
from mizzen.integrations.torch import ResumableLoader
from tests_integrations.test_attributes import Data, Net, begun


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
