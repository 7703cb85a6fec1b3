"""The bandwidth of many links that checkpoints can count on, from samples of counters (ReclaimNet V-E, F3).

`agent.network.uplink` does the same for the one link of a machine.

An agent reads its counters every 100 ms. The bandwidth available on a link is its capacity minus the use by others.

Samples of 100 ms vary more than a transfer of seconds does, and adjacent samples are correlated. So samples are first
averaged over blocks of some seconds. The lower confidence bound is the value below which the mean of the next block
lies with probability 1 - confidence. It is an order statistic of the blocks in the window. It assumes no distribution,
but it assumes that the next block is like those in the window.

Samples that are missing or impossible are NaN here, and never count.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agent.network.uplink import CONFIDENCE
from reclaim.arrays import Floats, column

_Table: TypeAlias = NDArray[np.float64]
"""A row for each link, a column for each sample."""


def block_means(samples_bytes_s: ArrayLike, samples_per_block: int) -> _Table:
    """Returns the mean of each block of samples; NaN where fewer than half of the samples of a block are there.

    The newest samples are in the last block. Samples at the start that fill no block are dropped.

    Raises:
        ValueError: a block has no samples.
    """
    if samples_per_block < 1:
        raise ValueError(f"samples_per_block: {samples_per_block}: must be 1 or more")
    samples = np.asarray(samples_bytes_s, dtype=np.float64)
    links, count = samples.shape
    blocks = count // samples_per_block
    parts = samples[:, count - blocks * samples_per_block :].reshape(links, blocks, samples_per_block)
    there = np.isfinite(parts) & (parts >= 0)
    enough = 2 * there.sum(2) >= samples_per_block
    return np.where(enough, np.where(there, parts, 0).sum(2) / np.maximum(there.sum(2), 1), np.nan)


def lower_bound_bytes_s(
    blocks_bytes_s: ArrayLike, unmeasured_bytes_s: ArrayLike, confidence: float = CONFIDENCE
) -> Floats:
    """Returns the lower confidence bound of each link's bandwidth.

    With n blocks this is the value at the position (n + 1) (1 - confidence) of the sorted blocks, interpolated between
    neighbours, with 0 at position 0. So a few blocks give a bound below all of them.

    Args:
        blocks_bytes_s: the means of the blocks in the window (rows: links); NaN: missing.
        unmeasured_bytes_s: the bound of a link without any block, for example a tenth of its capacity.
        confidence: the probability with which the next block is at least as fast.

    Raises:
        ValueError: a number is out of its range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: {confidence}: must be between 0 and 1, without both")
    blocks = np.asarray(blocks_bytes_s, dtype=np.float64)
    fallback = column("unmeasured_bytes_s", unmeasured_bytes_s, len(blocks))
    there = np.isfinite(blocks) & (blocks >= 0)
    counts = there.sum(1)
    ordered = np.sort(np.where(there, blocks, np.inf), axis=1)
    table = np.concatenate((np.zeros((len(blocks), 1)), ordered), axis=1)
    position = np.minimum((counts + 1) * (1 - confidence), counts)
    low = np.floor(position).astype(np.int64)
    high = np.minimum(low + 1, counts)
    row = np.arange(len(blocks))
    part = position - low
    found = table[row, low] * (1 - part) + table[row, high] * part
    return np.where(counts > 0, found, fallback)
