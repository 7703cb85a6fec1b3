"""Bandwidth of links between regions."""

import pytest

from activities.data.bandwidth_shares import share
from domain.protocol.data import NIGHTLY, ON_DEMAND
from infra.config.data import CopySettings


def test_a_link_has_one_budget() -> None:
    """All copies of a process over one link share its budget, each kind with its own share."""
    settings = CopySettings(link_bytes_per_s=1000.0, nightly_fraction=0.25)
    nightly, demand = (share(settings, "east", "west", name) for name in (NIGHTLY, ON_DEMAND))
    assert nightly is not None and demand is not None
    assert nightly.bandwidth is demand.bandwidth and nightly.name != demand.name
    assert share(settings, "east", "west", NIGHTLY) == nightly
    back = share(settings, "west", "east", NIGHTLY)
    assert back is not None and back.bandwidth is not nightly.bandwidth
    with pytest.raises(ValueError, match=r"fraction=0.3 of share 'nightly': only 0.25 of the budget is free"):
        nightly.bandwidth.share(NIGHTLY, 0.3)


def test_a_link_without_a_budget() -> None:
    """Without a configured limit there is no budget."""
    assert share(CopySettings(), "east", "west", NIGHTLY) is None
