"""Bandwidth from counters: what samples count, and how often the lower bound holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.network.uplink import bound_of
from research.reclaim.bandwidth import block_means, lower_bound_bytes_s

NAN = float("nan")


def test_blocks_need_half_of_their_samples() -> None:
    samples = [[99.0, 1, 2, 3, NAN, NAN, 6, NAN, NAN, NAN]]
    assert block_means(samples, 3)[0] == pytest.approx([2, NAN, NAN], nan_ok=True)
    assert block_means(samples, 2)[0] == pytest.approx([50, 2.5, NAN, 6, NAN], nan_ok=True)


def plain(blocks: list[float], confidence: float) -> float:
    """The bound of one link, by the definition."""
    ordered = [0.0, *sorted(blocks)]
    position = min((len(blocks) + 1) * (1 - confidence), len(blocks))
    low = int(position)
    return ordered[low] + (position - low) * (ordered[min(low + 1, len(blocks))] - ordered[low])


@given(
    st.lists(st.lists(st.one_of(st.floats(0, 1e9), st.just(NAN)), min_size=7, max_size=7), min_size=1, max_size=9),
    st.floats(0.05, 0.99),
)
def test_the_bound_equals_its_definition(links: list[list[float]], confidence: float) -> None:
    there = [[one for one in link if one == one] for link in links]
    wanted = [plain(link, confidence) if link else 7.0 for link in there]
    assert lower_bound_bytes_s(links, 7.0, confidence) == pytest.approx(wanted, rel=1e-9, abs=1e-6)
    # The agent computes the same for its one link.
    assert [bound_of(link, confidence) if link else 7.0 for link in there] == pytest.approx(wanted, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("blocks", "confidence"), [(60, 0.9), (19, 0.9), (60, 0.75)])
def test_the_next_block_is_as_fast_as_often_as_stated(blocks: int, confidence: float) -> None:
    """Over 20,000 links with skewed bandwidth, the next block reaches the bound in the stated share of cases."""
    draws = np.random.default_rng(3).lognormal(18, 0.6, (20_000, blocks + 1))
    bound = lower_bound_bytes_s(draws[:, :-1], 0.0, confidence)
    assert (draws[:, -1] >= bound).mean() == pytest.approx(confidence, abs=0.01)


def test_few_blocks_give_a_bound_below_all_of_them() -> None:
    """With two blocks and 90%, the position is 0.3 between 0 and the slower block."""
    assert lower_bound_bytes_s([[80.0, 50.0]], 1.0, 0.9)[0] == pytest.approx(15.0)
    assert list(lower_bound_bytes_s([[NAN, NAN], [-3.0, np.inf]], [2.0, 3.0])) == [2.0, 3.0]


def test_missing_samples_hardly_move_the_bound() -> None:
    """Ten minutes of 100 ms samples, of which 5% are missing and 1% are impossible."""
    draw = np.random.default_rng(4)
    use = np.clip(draw.normal(4e7, 5e6, (1, 6000)), 0, None)
    broken = use.copy()
    broken[0, draw.integers(6000, size=60)] = -1e9
    broken[0, draw.integers(6000, size=300)] = NAN
    bounds = [lower_bound_bytes_s(block_means(one, 100), 0.0)[0] for one in (use, broken)]
    assert bounds[1] == pytest.approx(bounds[0], rel=0.01) and 3.8e7 < bounds[0] < 4e7


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"confidence: 1.0: must be between 0 and 1"):
        lower_bound_bytes_s([[1.0]], 1.0, 1.0)
    with pytest.raises(ValueError, match="samples_per_block: 0: must be 1 or more"):
        block_means([[1.0]], 0)
