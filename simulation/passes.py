"""A pass over the queue: scan it, take batches from its head, and award what the regions bid (MAST 4.2, 4.3)."""

from dataclasses import replace
from itertools import islice
from math import inf

import numpy as np
import numpy.typing as npt

from auction.candidate import Candidate
from auction.immunity import immune_to
from capacity.scaling import MOST_SHORTAGES, Shortage
from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import PlacementRequest
from simulation.engine import Standing
from simulation.rivals.rival import Rival
from simulation.transitions import Transitions
from simulation.workload_columns import Ints
from simulation.workload_state import WorkloadState

_ASKED = 32
"""So many at once, for what they teach about the rest. Decisions are the same in batches of any size, but for joint
ones."""


class Passes:
    """When the next pass is due, and what it does.

    The outcome is that of asking the regions for every queued workload, in queue order. A workload is skipped if it
    asks for at least as much as one that was refused earlier in the pass: within a pass nothing is given up, so it
    would be refused as well. (The reference engines skip it too, although they have no negative cache.) A gang that
    has waited long enough to reserve is skipped only if the refused one could not reserve.
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions, self._settings = transitions, transitions.settings
        self.news = False
        """Whether something happened since the last pass."""
        self._last_s = -inf
        self._shares_s = -inf
        self._standing: Standing | None = None
        """Of the last pass."""

    def due_s(self) -> float:
        """When the next pass is; infinity: not before something happens."""
        if not self._transitions.queue:
            return inf
        wait_s = self._settings.tick_spacing_s if self.news else self._settings.full_scan_s
        return self._last_s + wait_s

    def go(self, now_s: float) -> None:
        """One pass."""
        transitions, engine = self._transitions, self._transitions.engine
        self._last_s, self.news = now_s, False
        if now_s - self._shares_s >= self._settings.full_scan_s:
            self._shares_s = now_s
            engine.set_tenants(transitions.shares.tenants(now_s))
        self._standing = standing = self._scan(now_s)
        self._renew(now_s, standing)
        engine.open(now_s)
        if transitions.policy.in_order:
            self._in_order(now_s, standing)
        elif isinstance(engine, Rival):
            for place in engine.turns(standing):
                self._ask(now_s, standing, np.array([place]))
        else:
            self._by_rank(now_s, standing)

    def shortages(self) -> list[Shortage]:
        """Workloads that no region had room for in the last pass, in the order of the queue; none over quota."""
        if self._standing is None:
            return []
        transitions, everywhere = self._transitions, frozenset(self._transitions.ledgers)
        within = self._standing.order[self._standing.rank != OVER_QUOTA_RANK].tolist()
        states = (transitions.states[number] for number in within if number in transitions.queue)
        return [
            Shortage(state.id, state.workload.jobs, everywhere if state.only is None else state.only)
            for state in islice(states, MOST_SHORTAGES)
        ]

    def _scan(self, now_s: float) -> Standing:
        transitions = self._transitions
        transitions.engine.change(transitions.pending, transitions.placed)
        transitions.pending, transitions.placed = [], []
        standing = transitions.engine.scan(now_s)
        transitions.columns.over_quota[standing.order] = standing.rank == OVER_QUOTA_RANK
        return standing

    def _renew(self, now_s: float, standing: Standing) -> None:
        """The regions learn of new ranks and checkpoints."""
        columns, numbers = self._transitions.columns, standing.placed
        made = columns.checkpoints_at(numbers, now_s, self._settings.checkpoint_interval_s)
        new = (standing.placed_rank != columns.rank[numbers]) | (made != columns.checkpoints[numbers])
        new &= columns.holds_all[numbers]
        columns.rank[numbers[new]], columns.checkpoints[numbers[new]] = standing.placed_rank[new], made[new]
        for number in numbers[new].tolist():
            self._transitions.tell(self._transitions.states[number])

    def _by_rank(self, now_s: float, standing: Standing) -> None:
        waited_s = self._waited_s(now_s, standing)
        may_reserve = waited_s > self._settings.reserve_after_s
        left = np.arange(len(standing.order))
        taken: set[str] = set()
        size = self._settings.batch if self._transitions.policy.joint else min(_ASKED, self._settings.batch)
        while len(left):
            batch, left = left[:size], left[size:]
            refused, reserved = self._ask(now_s, standing, batch)
            if not taken.issuperset(reserved.values()):
                taken.update(reserved.values())
                self._withdraw(standing, may_reserve, left, taken)
            hopeless = [place for place in refused if may_reserve[place] and place not in reserved]
            more = self._ask_no_less(standing, left, refused, np.zeros(len(standing.order)))
            # One that has waited for longer may reserve what another may not.
            as_hopeless = self._ask_no_less(standing, left, hopeless, waited_s)
            left = left[~more | (may_reserve[left] & ~as_hopeless)]

    def _in_order(self, now_s: float, standing: Standing) -> None:
        for place in np.argsort(standing.order):
            if self._ask(now_s, standing, place[None])[0]:
                return

    def _waited_s(self, now_s: float, standing: Standing) -> npt.NDArray[np.float64]:
        """By place in the queue, where it matters: where gangs may reserve."""
        if self._settings.reserve_after_s == inf:
            return np.zeros(len(standing.order))
        return now_s - np.array([self._transitions.states[number].waits_since_s for number in standing.order.tolist()])

    def _ask_no_less(
        self, standing: Standing, left: Ints, than: list[int], waited_s: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.bool_]:
        """Which of the places `left` ask for at least as much as one of `than`, and have waited for no longer."""
        if not (than and len(left)):
            return np.zeros(len(left), np.bool_)
        asks = [(standing.order[places], standing.rank[places], waited_s[places]) for places in (left, than)]
        return self._transitions.columns.ask_no_less(*asks[0], *asks[1])

    def _withdraw(self, standing: Standing, may_reserve: npt.NDArray[np.bool_], left: Ints, taken: set[str]) -> None:
        """Clears `may_reserve` of the places `left` for which all regions where they may run are reserved."""
        states, everywhere = self._transitions.states, frozenset(self._transitions.ledgers)
        for place in left[may_reserve[left]].tolist():
            only = states[int(standing.order[place])].only
            may_reserve[place] = not (everywhere if only is None else only) <= taken

    def _ask(self, now_s: float, standing: Standing, batch: Ints) -> tuple[list[int], dict[int, str]]:
        """Asks the regions for a batch, and awards what they offer.

        Returns:
            The places in the queue whose refusal holds for all that ask for at least as much; and the region that was
            reserved, by the place in the queue of the workload that reserved it.
        """
        transitions = self._transitions
        candidates: list[Candidate] = []
        states: list[WorkloadState] = []
        for place in batch.tolist():
            state = transitions.states[int(standing.order[place])]
            ranked = standing.ranked(place)
            jobs = state.workload.jobs
            if transitions.policy.rival is None:
                jobs = tuple(
                    job if job.gpu_types == types else replace(job, gpu_types=types)
                    for job, types in zip(jobs, ranked.gpu_types, strict=True)
                )
            displaces = frozenset(ranked.displaces)
            immune = immune_to(state.id, transitions.evictors)
            request = PlacementRequest(state.id, ranked.rank, jobs, immune, displaces)
            waited_s = now_s - state.waits_since_s
            candidates.append(
                Candidate(request, state.only, waited_s=waited_s, max_runtime_s=state.workload.max_runtime_s)
            )
            states.append(state)
        refused: list[int] = []
        reserved: dict[int, str] = {}
        for place, state, candidate, outcome in zip(
            batch.tolist(), states, candidates, transitions.engine.place(candidates), strict=True
        ):
            if outcome.plan is not None:
                transitions.award(now_s, state, candidate.request, outcome.plan, candidate.request.rank)
                # Those have another rank now: others may evict them.
                self.news |= not candidate.request.displaces.issubset(outcome.plan.victims)
            elif (
                not candidate.request.may_not_evict
                and candidate.request.jobs == state.workload.jobs
                and len(candidate.request.jobs) == 1
            ):
                refused.append(place)  # (With less room the first job of several may leave its place to the next.)
            if outcome.reserved is not None:
                reserved[place] = str(outcome.reserved.detail["region"])
        return refused, reserved
