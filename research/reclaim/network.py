"""Transfers over shared links: the rates of all flows, and what is left for research traffic.

Without shaping, the connections of all transfers and research traffic share each link fairly (max-min). With shaping,
P3 decides: planned migrations first, then recoveries, then periodic checkpoints, all within the migration share of the
bandwidth that was measured last. If a link then carries less than was assigned, everything on it is slowed in
proportion.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import ceil, floor, inf

import numpy as np

from reclaim.admission import AdmissionDecision, FlowOutcome, Flows, decide
from reclaim.arrays import Floats, Ints
from reclaim.traffic import migration_share
from research.reclaim.scenario import STEP_S, LendingScenario

_DONE_BYTES = 0.5
_EPSILON_S = 1e-6


class FlowClass(IntEnum):
    """The class of a flow, in the order of precedence under shaping."""

    PLANNED = 0
    RECOVERY = 1
    WRITE = 2


@dataclass(eq=False)
class Flow:
    """A transfer of a job over shared links."""

    number: int
    job: int
    kind: FlowClass
    path: tuple[int, ...]
    remaining_bytes: float
    is_controlled: bool
    deadline_s: float = inf
    rest_s: float = 0.0
    start_s: float = 0.0
    is_admitted: bool = False
    is_refused: bool = False
    rate_bytes_s: float = 0.0
    limit_bytes_s: float = inf
    progress_s: float = 0.0
    """The work that the checkpoint contains."""


@dataclass
class Carried:
    """Research traffic on the paths of flows."""

    flow_s: float = 0.0
    """The time of all flows together..."""
    displaced_s: float = 0.0
    """...and the same, each moment weighted with the displaced share on the path's most affected link."""

    @property
    def degradation(self) -> float:
        """The share of research traffic that was displaced."""
        return self.displaced_s / self.flow_s if self.flow_s else 0.0


class FlowNetwork:
    """The flows of one run."""

    def __init__(self, scenario: LendingScenario, is_shaped: bool, research_share: float, period_s: float) -> None:
        """Starts without flows. `period_s` is the control period of P3; 0: it sees the current bandwidth."""
        self.flows: dict[int, Flow] = {}
        self.all, self.in_migrations = Carried(), Carried()
        self.migrated_bytes = self.written_bytes = 0.0
        self._scenario, self._is_shaped = scenario, is_shaped
        self._research_share, self._period_s = research_share, period_s
        self._now_s = 0.0
        self._displaced: dict[int, float] = {}
        """The displaced share of research traffic of each flow that is sent, on the most affected link of its path."""
        self._next_change_s = inf
        self._shares: dict[int, Ints] = {}
        self._bandwidth: tuple[int, Floats] = (-1, np.zeros(0))

    def add(self, flow: Flow) -> None:
        """Adds a flow; `recompute` sets its rate."""
        flow.limit_bytes_s = self._scenario.traffic.write_bytes_s
        self.flows[flow.number] = flow

    def remove(self, flow: Flow) -> None:
        """Removes a flow."""
        self.flows.pop(flow.number, None)

    @property
    def next_s(self) -> float:
        """When a flow completes or a rate changes next."""
        return self._next_change_s

    def advance(self, now_s: float) -> list[Flow]:
        """Carries all flows to a time that is not after `next_s`, and returns those that are complete, removed."""
        passed_s = now_s - self._now_s
        self._now_s = now_s
        if passed_s > 0:
            for flow in self.flows.values():
                displaced = self._displaced.get(flow.number)
                if displaced is not None:
                    for carried in (self.all,) if flow.kind is FlowClass.WRITE else (self.all, self.in_migrations):
                        carried.flow_s += passed_s
                        carried.displaced_s += displaced * passed_s
                sent = min(flow.rate_bytes_s * passed_s, flow.remaining_bytes)
                flow.remaining_bytes -= sent
                if flow.kind is FlowClass.WRITE:
                    self.written_bytes += sent
                else:
                    self.migrated_bytes += sent
        done = [
            flow for flow in self.flows.values()
            if flow.remaining_bytes <= max(_DONE_BYTES, flow.rate_bytes_s * _EPSILON_S) and flow.start_s <= now_s
        ]  # fmt: skip
        for flow in done:
            self.remove(flow)
        return done

    def recompute(self, now_s: float) -> list[Flow]:
        """Sets all rates, and returns planned flows that P3 refuses, removed."""
        if not self.flows:
            self._displaced, self._next_change_s = {}, inf
            return []
        step = self._scenario.step(now_s)
        if self._bandwidth[0] != step:
            self._bandwidth = step, self._scenario.links_bytes_s[self._scenario.row_of, step]
        bandwidth = self._bandwidth[1]
        refused: list[Flow] = []
        if self._is_shaped:
            refused = self._shape(now_s)
        started = [flow for flow in self.flows.values() if flow.start_s <= now_s]
        self._share(bandwidth, started)
        changes = [(step + 1) * STEP_S if step + 1 < self._scenario.links_bytes_s.shape[1] else inf]
        if self._is_shaped and self._period_s > 0:
            changes.append(self._next_measured_s(now_s))
        for flow in self.flows.values():
            if flow.start_s > now_s:
                changes.append(flow.start_s)
            elif flow.rate_bytes_s > 0:
                changes.append(now_s + max(flow.remaining_bytes / flow.rate_bytes_s, _EPSILON_S))
        self._next_change_s = min(one for one in changes if one > now_s)
        return refused

    def _measured_at_s(self, now_s: float) -> float:
        return max(0.0, (floor(now_s / self._period_s + 1e-9) - 1) * self._period_s)

    def _next_measured_s(self, now_s: float) -> float:
        """Returns when the measured bandwidth changes next: one period after the next step, at a control time."""
        step = self._scenario.step(self._measured_at_s(now_s))
        return (ceil((step + 1) * STEP_S / self._period_s - 1e-9) + 1) * self._period_s

    def _share_of(self, step: int) -> Ints:
        """Returns the migration share of each link as of a step."""
        if step not in self._shares:
            measured = self._scenario.links_bytes_s[self._scenario.row_of, step]
            self._shares = {step: migration_share(measured, research_share=self._research_share)}
        return self._shares[step]

    def _shape(self, now_s: float) -> list[Flow]:
        """Sets the rates of controlled flows by P3."""
        measured_at_s = self._measured_at_s(now_s) if self._period_s > 0 else now_s
        share = self._share_of(self._scenario.step(measured_at_s))
        left = share.tolist()
        planned = [one for one in self.flows.values() if one.kind is FlowClass.PLANNED and one.is_controlled]
        refused = []
        if planned:
            paths = np.full((len(planned), max(len(flow.path) for flow in planned)), -1, np.int64)
            for row, flow in enumerate(planned):
                paths[row, : len(flow.path)] = flow.path
            found = decide(self._columns(planned, paths), share, now_s)
            left = found.left_bytes_s.tolist()
            refused = self._apply(planned, found)
        for kind in (FlowClass.RECOVERY, FlowClass.WRITE):
            same = [one for one in self.flows.values() if one.kind is kind and one.is_controlled]
            if same:
                rates = max_min([(one.path, 1.0, one.limit_bytes_s) for one in same], left)
                for flow, rate in zip(same, rates, strict=True):
                    flow.rate_bytes_s = rate
                    for link in flow.path:
                        left[link] -= rate
        return refused

    @staticmethod
    def _columns(planned: list[Flow], paths: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> Flows:
        return Flows.of(
            [one.remaining_bytes for one in planned],
            [one.deadline_s for one in planned],
            paths,
            rest_s=[one.rest_s for one in planned],
            limit_bytes_s=[one.limit_bytes_s for one in planned],
            start_s=[one.start_s for one in planned],
            is_admitted=[one.is_admitted for one in planned],
        )

    def _apply(self, planned: list[Flow], found: AdmissionDecision) -> list[Flow]:
        refused = []
        for row, flow in enumerate(planned):
            if found.outcome[row] <= FlowOutcome.SQUEEZED:
                flow.is_admitted = True
                flow.start_s, flow.rate_bytes_s = float(found.start_s[row]), float(found.rate_bytes_s[row])
            elif flow.is_admitted:
                # Its notice no longer suffices. It continues with the rate of a recovery until the machine leaves.
                flow.kind = FlowClass.RECOVERY
            else:
                flow.is_refused = True
                self.remove(flow)
                refused.append(flow)
        return refused

    def _share(self, bandwidth: Floats, started: list[Flow]) -> None:
        """Sets the rates of flows without shaping, and what research traffic loses."""
        traffic = self._scenario.traffic
        links = {link for flow in started for link in flow.path}
        controlled = [one for one in started if self._is_shaped and one.is_controlled]
        free = [one for one in started if not (self._is_shaped and one.is_controlled)]
        for flow in self.flows.values():
            if flow.start_s > self._now_s:
                flow.rate_bytes_s = 0.0
        used = dict.fromkeys(links, 0.0)
        for flow in controlled:
            for link in flow.path:
                used[link] += flow.rate_bytes_s
        offered = {link: traffic.research_share * float(bandwidth[link]) for link in links}
        got = dict(offered)
        if free:
            room = [0.0] * len(bandwidth)
            for link in links:
                room[link] = max(float(bandwidth[link]) - used[link], 0.0)
            wants = [(one.path, float(traffic.connections), one.limit_bytes_s) for one in free]
            wants += [((link,), 1.0, offered[link]) for link in links]
            rates = max_min(wants, room)
            for flow, rate in zip(free, rates, strict=False):
                flow.rate_bytes_s = rate
            got = dict(zip(links, rates[len(free) :], strict=True))
        else:
            slowed = {link: min(1.0, float(bandwidth[link]) / max(used[link] + offered[link], 1e-9)) for link in links}
            if min(slowed.values(), default=1.0) < 1.0:
                got = {link: offered[link] * slowed[link] for link in links}
                for flow in controlled:
                    flow.rate_bytes_s *= min(slowed[link] for link in flow.path)
        lost = {link: 1 - got[link] / offered[link] if offered[link] > 0 else 0.0 for link in links}
        self._displaced = {flow.number: max(lost[link] for link in flow.path) for flow in started}


def max_min(wants: list[tuple[tuple[int, ...], float, float]], room: list[float]) -> list[float]:
    """Returns max-min fair rates. Each flow has a path, a weight and a limit; `room` is the capacity of each link.

    All rates grow in proportion to their weights; a flow stops at its limit, or when a link of its path is full.
    """
    if len(wants) == 1:
        path, _, limit = wants[0]
        return [max(0.0, min(limit, *(room[link] for link in path)))]
    rates = [0.0] * len(wants)
    left = dict.fromkeys((link for path, _, _ in wants for link in path), 0.0)
    for link in left:
        left[link] = max(room[link], 0.0)
    growing = set(range(len(wants)))
    while growing:
        weight = dict.fromkeys(left, 0.0)
        for one in growing:
            for link in wants[one][0]:
                weight[link] += wants[one][1]
        level = min((left[link] / weight[link] for link in left if weight[link] > 0), default=inf)
        level = min(level, min((wants[one][2] - rates[one]) / wants[one][1] for one in growing))
        if level == inf:
            break
        for one in growing:
            rates[one] += level * wants[one][1]
        for link in left:
            left[link] -= level * weight[link]
        full = {link for link in left if weight[link] > 0 and left[link] <= 1e-9 * max(room[link], 1.0)}
        growing = {
            one for one in growing
            if wants[one][2] - rates[one] > 1e-9 * max(wants[one][2], 1.0) and not full.intersection(wants[one][0])
        }  # fmt: skip
    return rates
