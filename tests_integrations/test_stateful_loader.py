"""torchdata's StatefulDataLoader: its own state is refused, and a `ResumableLoader` of it resumes exactly."""

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from mizzen.checkpoint import StateError, Tracked
from mizzen.integrations.torch import ResumableLoader


class Noisy(Dataset):
    """Twenty samples: their number, and a random one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)


def test_its_own_state_is_refused() -> None:
    """The message names what to write instead."""
    with pytest.raises(StateError, match=r"part 'data': .* ResumableLoader\(loader\)"):
        Tracked({"data": StatefulDataLoader(Noisy(), batch_size=4, shuffle=True)})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_it_goes_on_after_each_batch(workers: int) -> None:
    """The batches after a restore are those that would have followed the save, also the noise in them."""

    def run(state: dict[str, Any] | None, limit: int) -> tuple[list[Any], dict[str, Any]]:
        torch.manual_seed(3)
        loader = ResumableLoader(StatefulDataLoader(Noisy(), batch_size=4, num_workers=workers, shuffle=True))
        tracked = Tracked({"loader": loader})
        if state is not None:
            tracked.restore(state)
        batches = (batch for _ in range(2) for batch in loader)
        seen = [batch.tolist() for batch in islice(batches, limit)]
        return seen, tracked.capture(len(seen))

    whole = run(None, 7)[0]
    for cut in range(1, 7):
        seen, state = run(None, cut)
        assert seen + run(state, 7 - cut)[0] == whole, cut
