"""The bandwidth of many links that checkpoints can count on, from samples of counters (ReclaimNet V-E, F3).

`agent.network.uplink` does the same for the one link of a machine.

An agent reads its counters every 100 ms. There are two kinds of samples:

- the use of an interface by others: what is available is the link's capacity minus this use;
- what a transfer achieved: only while it had bytes to send, because an idle transfer says nothing about the link.

Samples of 100 ms vary more than a transfer of seconds does, and neighbours are alike. So they are averaged over blocks
of some seconds first. The lower confidence bound is the value below which the mean of the next block lies with
probability 1 - confidence, by the order of the blocks in the window. It assumes no distribution, but that the next
block is like those in the window.

Samples that are missing or impossible are NaN here, and never count.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agent.network.uplink import CONFIDENCE, SLACK
from reclaim.arrays import Floats, column

_Table: TypeAlias = NDArray[np.float64]
"""A row for each link, a column for each sample."""


def rates_bytes_s(counter_bytes: ArrayLike, at_s: ArrayLike, capacity_bytes_s: ArrayLike) -> _Table:
    """Returns the rate between each two readings of counters, in bytes per second; one column less than readings.

    A rate is NaN if one of its two readings is missing, if the counter went back (a restart), if time did not pass, or
    if the rate is above any that the link can have.

    Args:
        counter_bytes: readings of each link's counter (rows: links, columns: readings); NaN: missing.
        at_s: the time of each reading, of the same shape, or one row for all links.
        capacity_bytes_s: the capacity of each link.

    Raises:
        ValueError: a capacity is not above 0, or the table is not two-dimensional.
    """
    counters = np.asarray(counter_bytes, dtype=np.float64)
    if counters.ndim != 2:
        raise ValueError(f"counter_bytes: has {counters.ndim} dimensions: must have 2, links and readings")
    most = SLACK * column("capacity_bytes_s", capacity_bytes_s, len(counters), positive=True)
    passed_s = np.diff(np.broadcast_to(np.asarray(at_s, dtype=np.float64), counters.shape))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.diff(counters) / passed_s
        good = (passed_s > 0) & (found >= 0) & (found <= most[:, None])
    return np.where(good, found, np.nan)


def achieved_bytes_s(rate_bytes_s: ArrayLike, pending_bytes: ArrayLike) -> _Table:
    """Returns the rates of transfers in the samples in which they had bytes to send, NaN in others."""
    return np.where(np.asarray(pending_bytes) > 0, np.asarray(rate_bytes_s, dtype=np.float64), np.nan)


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
