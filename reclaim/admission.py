"""P3, which migrations are admitted, at which rate and when they start (section VII.B, theorems 3 and 4).

A decision holds on every controlled link of every path. It is made again when a flow arrives, starts or ends, when the
bandwidth changes, and in each control period. New flows get only what the admitted ones do not need. So every admitted
flow completes before its deadline if the links carry the rates that were assigned (theorem 3), and the rates on a link
never exceed its share (theorem 4). If the bandwidth falls below what was promised, flows that no longer fit get what is
left, because dips are often short.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Bools, Floats, Ints, column
from reclaim.traffic import UNLIMITED_BYTES_S, fill, fill_in_order, least_rates, link_sums


class FlowOutcome(IntEnum):
    """The result of the admission of a flow."""

    ADMITTED = 0
    """The flow completes in time if the links carry the assigned rates."""
    SQUEEZED = 1
    """The flow was admitted, but since the bandwidth has fallen it needs more than is left. It gets what is left, and
    is admitted again if the bandwidth recovers in time."""
    NO_TIME = 2
    """The notice is not longer than the time that must be left after the transfer. This and the following outcomes mean
    degraded recovery: the job restarts from its last complete checkpoint."""
    TOO_NARROW = 3
    """The flow alone needs more than its own limit or than the share of a link of its path."""
    CROWDED = 4
    """Admitted flows and flows with earlier deadlines leave too little bandwidth."""


class SpareSharing(StrEnum):
    """How the bandwidth is divided that is left when every admitted flow has its minimum rate."""

    MAX_MIN = "max-min"
    """All flows that have started, by max-min fair increments, as in the paper."""
    DEADLINE = "deadline"
    """The flow with the earliest deadline, as much as it can use, then the next one. Flows end one after the other, so
    fewer are under way when the bandwidth falls."""


@dataclass(frozen=True)
class Flows:
    """Planned migrations, one element for each. Times are seconds on the caller's clock."""

    remaining_bytes: Floats
    """The bytes on the wire that are still to be sent."""
    deadline_s: Floats
    """When the source leaves."""
    rest_s: Floats
    """The time that must be left after the transfer: T_r if the job must run at its destination before the source
    leaves, the commit of the upload with a store."""
    limit_bytes_s: Ints
    """The highest useful rate, such as that of the disk."""
    paths: Ints
    """The controlled links of each flow (`Topology.paths`), padded with -1."""
    start_s: Floats
    """When each flow starts, for admitted flows from the decision that admitted it."""
    is_admitted: Bools
    """Whether an earlier decision has admitted the flow; also of a flow that is squeezed."""

    @classmethod
    def of(
        cls,
        remaining_bytes: ArrayLike,
        deadline_s: ArrayLike,
        paths: Ints,
        *,
        rest_s: ArrayLike,
        limit_bytes_s: ArrayLike = UNLIMITED_BYTES_S,
        start_s: ArrayLike = 0.0,
        is_admitted: ArrayLike = False,
    ) -> "Flows":
        """Returns flows, one for each row of `paths`. A single number applies to all.

        Raises:
            ValueError: a column has a wrong size, or an element that is negative or not a number.
        """
        count = len(paths)
        limit = np.minimum(column("limit_bytes_s", limit_bytes_s, count, infinite=True), UNLIMITED_BYTES_S)
        return cls(
            column("remaining_bytes", remaining_bytes, count),
            column("deadline_s", deadline_s, count),
            column("rest_s", rest_s, count),
            limit.astype(np.int64),
            paths,
            column("start_s", start_s, count),
            np.broadcast_to(np.asarray(is_admitted, np.bool_), count),
        )

    def __len__(self) -> int:
        return len(self.remaining_bytes)


@dataclass(frozen=True)
class AdmissionDecision:
    """The decision for all flows, in their order."""

    outcome: Ints
    """A `FlowOutcome` for each flow."""
    least_bytes_s: Ints
    """The minimum rate of each flow from its start until its deadline (equation 12)."""
    rate_bytes_s: Ints
    """The rate of each flow from now until the next decision. 0 for flows that have not started or are refused."""
    start_s: Floats
    """When each flow starts. A flow keeps its start, but if it is squeezed it starts now."""
    left_bytes_s: Ints
    """The unused part of each link's share. Pre-sync may use it (`fill` with rates of 0) until the next decision."""


def decide(
    flows: Flows,
    share_bytes_s: Ints,
    now_s: float,
    headroom_share: float = 0.0,
    spread: SpareSharing = SpareSharing.MAX_MIN,
) -> AdmissionDecision:
    """Returns which flows are admitted, with their rates. `share_bytes_s` is the migration share of each link.

    Flows are considered in the order of their deadlines, then of the rate that they need, then of their position; those
    that are admitted already come first. A flow is admitted if the rate that it needs is left on every link of its
    path. A flow that is not admitted is skipped: a later flow that needs less may still be admitted. If all flows fit,
    this admits all. What is left of each link goes to the flows that have started (`SpareSharing`). A refused flow may
    be offered again in later decisions.

    Starts of newly admitted flows are staggered: flow i of K' starts i tau/K' later, but no later than the bandwidth
    that is free now permits (`_starts`).

    `headroom_share` is the share of each link that new flows leave free, so that admitted flows still fit when the
    network has carried less than it was assigned.
    """
    begin_s = np.where(flows.is_admitted, np.maximum(flows.start_s, now_s), now_s)
    window_s = flows.deadline_s - flows.rest_s - begin_s
    # A new flow gets one byte per second more than it needs. While it runs, what it needs then never exceeds, even when
    # rounded, what it was admitted for. So rounding cannot end an admission.
    least = least_rates(flows.remaining_bytes, window_s, np.where(flows.is_admitted, 0, 1))
    outcome = np.full(len(flows), FlowOutcome.ADMITTED, np.int64)
    outcome[least > _narrowest(flows, share_bytes_s)] = FlowOutcome.TOO_NARROW
    outcome[(window_s <= 0) & (flows.remaining_bytes > 0)] = FlowOutcome.NO_TIME
    open_to_new = np.floor(share_bytes_s * (1 - headroom_share)).astype(np.int64)
    floors = _floors(flows, least, outcome, share_bytes_s, open_to_new)

    takes_part = outcome <= FlowOutcome.SQUEEZED
    limits = np.where(takes_part & (flows.remaining_bytes > 0), flows.limit_bytes_s, 0)
    start_s = np.where(outcome == FlowOutcome.SQUEEZED, np.minimum(flows.start_s, now_s), flows.start_s)
    is_new = takes_part & ~flows.is_admitted
    if is_new.any():
        planned = fill(floors, limits, flows.paths, share_bytes_s)
        start_s = np.where(is_new, _starts(flows, planned, is_new, now_s), start_s)
    running = takes_part & (start_s <= now_s)
    floors, limits = np.where(running, floors, 0), np.where(running, limits, 0)
    if spread == SpareSharing.DEADLINE:
        rates = fill_in_order(floors, limits, flows.paths, share_bytes_s, np.lexsort((least, flows.deadline_s)))
    else:
        rates = fill(floors, limits, flows.paths, share_bytes_s)
    left = share_bytes_s - link_sums(rates, flows.paths, len(share_bytes_s))
    return AdmissionDecision(outcome, least, rates, start_s, left)


def _narrowest(flows: Flows, room_bytes_s: Ints) -> Ints:
    """Returns the highest rate that each flow may have alone, in the room of the links."""
    most = np.iinfo(np.int64).max
    room = np.append(room_bytes_s, most)
    return np.asarray(np.minimum(room[flows.paths].min(axis=1, initial=most), flows.limit_bytes_s))


def _floors(flows: Flows, least: Ints, outcome: Ints, share: Ints, open_to_new: Ints) -> Ints:
    """Returns the rate that each flow is assured of, and marks flows that do not fit as SQUEEZED or CROWDED."""
    links = len(share)
    fits = outcome == FlowOutcome.ADMITTED
    old = link_sums(np.where(fits & flows.is_admitted, least, 0), flows.paths, links)
    new = link_sums(np.where(fits & ~flows.is_admitted, least, 0), flows.paths, links)
    none_squeezed = (fits | (outcome == FlowOutcome.NO_TIME))[flows.is_admitted].all() and (old <= share).all()
    if none_squeezed and ((new == 0) | (old + new <= open_to_new)).all():
        return np.where(fits, least, 0)
    floors = np.zeros_like(least)
    used = np.zeros(links, np.int64)

    def admit(candidates: Bools, most: Ints, otherwise: FlowOutcome) -> None:
        for flow in order[candidates[order]]:
            path = flows.paths[flow][flows.paths[flow] >= 0]
            if (used[path] + least[flow] <= most[path]).all():
                floors[flow] = least[flow]
                used[path] += least[flow]
            else:
                outcome[flow] = otherwise

    order = np.lexsort((least, flows.deadline_s))
    outcome[flows.is_admitted & (outcome == FlowOutcome.TOO_NARROW)] = FlowOutcome.SQUEEZED
    admit(fits & flows.is_admitted, share, FlowOutcome.SQUEEZED)
    # Only now: a flow that cannot complete must not take from flows with later deadlines that can.
    for flow in order[outcome[order] == FlowOutcome.SQUEEZED]:
        path = flows.paths[flow][flows.paths[flow] >= 0]
        floors[flow] = min((share - used)[path].min(initial=least[flow]), least[flow], flows.limit_bytes_s[flow])
        used[path] += floors[flow]
    admit(fits & ~flows.is_admitted, open_to_new, FlowOutcome.CROWDED)
    return floors


def _starts(flows: Flows, planned: Ints, is_new: Bools, now_s: float) -> Floats:
    """Returns staggered starts of the new flows, in the order of their deadlines.

    A later start raises the rate that a flow needs. It may rise to the rate that the flow would get if all started now;
    those rates fit on all links together.
    """
    starts = np.full(len(flows), now_s)
    order = np.lexsort((planned, flows.deadline_s))
    order = order[is_new[order] & (planned[order] > 2)]
    notice_s = flows.deadline_s[order] - now_s
    wanted_s = np.arange(len(order)) * notice_s / max(len(order), 1)
    # Two bytes per second less than planned: the rate that is needed then is rounded up, and has one spare.
    latest_s = notice_s - flows.rest_s[order] - flows.remaining_bytes[order] / (planned[order] - 2)
    starts[order] = now_s + np.clip(wanted_s, 0, np.maximum(latest_s, 0))
    return starts
