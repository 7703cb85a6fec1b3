"""Generated instances have the statistics of MAST's instance."""

import numpy as np
import pytest

from domain.instance import HIGH_PRIORITY
from research.tetris.generate import generate
from tetris.columns import NONE
from tetris.problem import PlacementProblem


def test_the_shape_is_masts() -> None:
    """Percentiles of sharing, high-priority demand over supply, and the share of training at home match MAST's."""
    columns = generate(6000, 10, seed=2)
    shared = np.bincount(columns.job_table, minlength=6000)
    assert np.percentile(shared, [50, 90, 99]) == pytest.approx([3, 17, 45], rel=0.35)
    region = PlacementProblem(columns).state.region
    high = (columns.priority <= HIGH_PRIORITY) & (columns.gpu_type != NONE)
    for kind, supply in enumerate(columns.supply_h):
        mine = high & (columns.gpu_type == kind)
        assert columns.gpu_h[mine].sum() / supply.sum() == pytest.approx(0.85, abs=0.02)
        there = mine & (region != NONE)
        demand = np.bincount(region[there], weights=columns.gpu_h[there], minlength=len(supply))
        assert (demand[supply > 0] / supply[supply > 0]).max() == pytest.approx(2.63, abs=0.1)
    hours = columns.gpu_h * (region != NONE) * (columns.supply_h[columns.gpu_type, region] > 0)
    assert hours[high].sum() / columns.gpu_h[high].sum() == pytest.approx(0.908, abs=0.02)
    assert all(excess == 0 for excess in PlacementProblem(columns).excess)


def test_the_same_seed_gives_the_same_instance() -> None:
    """An instance depends only on its numbers of tables and regions and its seed."""
    one, two, other = generate(500, 5, 1), generate(500, 5, 1), generate(500, 5, 2)
    assert np.array_equal(one.job_table, two.job_table) and np.array_equal(one.home, two.home)
    assert not np.array_equal(one.size_bytes, other.size_bytes)
    with pytest.raises(ValueError, match="regions: 2: must be at least 3"):
        generate(500, 2)
