"""P3, the bandwidth of migrations: traffic classes, minimum rates for deadlines, and max-min sharing (section VII).

Rates are whole bytes per second, as in the maps and classes that enforce them, so sums are exact. All bytes are bytes
on the wire (`wire_bytes`): a rate that is enforced on packets contains their headers.
"""

import numpy as np
import numpy.typing as npt

from domain.traffic import OVERHEAD_SHARE
from reclaim.arrays import Floats, Ints

RESEARCH_SHARE = 0.3
"""P3's beta, the share of a link's bandwidth that is reserved for research traffic."""
UNLIMITED_BYTES_S = 2**52
"""The bandwidth of a link or a flow without a limit. Sums of many stay exact."""


def wire_bytes(payload_bytes: npt.ArrayLike, overhead_share: float = OVERHEAD_SHARE) -> Floats:
    """Returns the bytes on the wire of some bytes of payload."""
    return np.asarray(np.ceil(np.asarray(payload_bytes, np.float64) * (1 + overhead_share)))


def migration_share(
    bandwidth_bytes_s: npt.ArrayLike,
    least_research_bytes_s: npt.ArrayLike = 0.0,
    research_share: float = RESEARCH_SHARE,
) -> Ints:
    """Returns B_mig = B - max(beta B, B_min) of each link, for all migrations together, at least 0.

    Raises:
        ValueError: the share for research traffic is not from 0 to 1.
    """
    if not 0 <= research_share <= 1:
        raise ValueError(f"research_share: {research_share}: must be from 0 to 1")
    bandwidth = np.minimum(np.asarray(bandwidth_bytes_s, np.float64), UNLIMITED_BYTES_S)
    reserved = np.maximum(research_share * bandwidth, np.asarray(least_research_bytes_s, np.float64))
    share = bandwidth - reserved
    return np.asarray(np.floor(np.maximum(share, 0)), np.int64)


def least_rates(remaining_bytes: Floats, window_s: Floats, spare_bytes_s: npt.ArrayLike = 0) -> Ints:
    """Returns r_min = C/(tau - T_r) (equation 12), rounded up, for flows whose window is tau - T_r.

    The rate of a window that is not above 0 is `UNLIMITED_BYTES_S`; that of a flow without remaining bytes is 0.
    `spare_bytes_s` is added to the rate of each flow that has one.
    """
    usable = window_s > 0
    exact = np.divide(remaining_bytes, window_s, out=np.full(len(window_s), np.inf), where=usable)
    # The margin is larger than the rounding errors of the window and of the quotient.
    rates = np.minimum(np.floor(exact * (1 + 2.0**-40)) + 1 + spare_bytes_s, UNLIMITED_BYTES_S)
    return np.where(remaining_bytes > 0, rates, 0).astype(np.int64)


def link_sums(rates: Ints, paths: Ints, links: int) -> Ints:
    """Returns the sum of the rates on each link. Elements of `paths` below 0 are padding."""
    sums = np.zeros(links + 1, np.int64)
    np.add.at(sums, paths, rates[:, None])
    return sums[:-1]


def fill(rates: Ints, limits: Ints, paths: Ints, share_bytes_s: Ints) -> Ints:
    """Returns rates raised as far as the links allow, by max-min fair increments (progressive filling).

    The increments of all flows grow together. A flow stops at its limit, or when a link of its path is full: less than
    one byte per second is left for each flow that still grows. With one link this is water filling (section VII.B).
    The given rates must fit.
    """
    found = rates.copy()
    links = len(share_bytes_s)
    grows = found < limits
    while grows.any():
        left = share_bytes_s - link_sums(found, paths, links)
        growing = link_sums(grows.astype(np.int64), paths, links)
        room = np.append(np.where(growing > 0, left // np.maximum(growing, 1), UNLIMITED_BYTES_S), UNLIMITED_BYTES_S)
        step = np.minimum(room[paths].min(axis=1, initial=UNLIMITED_BYTES_S), limits - found)
        grows &= step > 0
        if grows.any():
            # The least step of all: a flow elsewhere may grow further, in the next round.
            found[grows] += step[grows].min()
            grows &= found < limits
    return found


def fill_in_order(rates: Ints, limits: Ints, paths: Ints, share_bytes_s: Ints, order: Ints) -> Ints:
    """Returns rates raised one flow after the other, each as far as its limit and the links allow."""
    found = rates.copy()
    left = share_bytes_s - link_sums(found, paths, len(share_bytes_s))
    for flow in order[found[order] < limits[order]]:
        path = paths[flow][paths[flow] >= 0]
        more = left[path].min(initial=limits[flow] - found[flow])
        found[flow] += more
        left[path] -= more
    return found
