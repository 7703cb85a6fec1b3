"""Passes over the queue: scan it, offer batches of its head to the regions, and award their bids (MAST 4.2, 4.3)."""

from collections import defaultdict, deque
from dataclasses import replace
from itertools import islice
from math import inf, nextafter

import numpy as np
import numpy.typing as npt

from capacity.scaling import MOST_SHORTAGES, Shortage
from domain.lifecycle.attempts import Step
from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import PlacementRequest
from gms.auction.candidate import Candidate
from gms.auction.growth import Grower
from gms.auction.immunity import immune_to
from gms.auction.region_bidder import reserve_later_s
from rms.consolidation import CONSIDER_S, MOST_WAITING, Mover, consolidation, may_move, moves_left, wanted_types
from simulation.engine import OrderedEngine, Production, ScanOrder
from simulation.transitions import Transitions
from simulation.workload_columns import Ints
from simulation.workload_state import WorkloadState

_ASKED = 32
"""Largest batch: after each batch, its refusals are used to skip workloads of the rest of the queue.

The batch size does not change decisions.
"""


class Passes:
    """Schedules and runs the passes.

    The outcome is the same as if every queued workload was offered to the regions, in queue order. A workload is
    skipped if it requests at least as much as one that was refused earlier in the pass: no slots are released during a
    pass, so it would be refused too. (This also applies to the reference engine, which has no negative cache.) A
    workload that may reserve is skipped only if the refused workload could reserve, too, and got no reservation.
    """

    def __init__(self, transitions: Transitions) -> None:
        self._transitions, self._settings = transitions, transitions.settings
        engine = transitions.engine
        self._ordered = engine if isinstance(engine, OrderedEngine) else None
        self.news = False
        """Whether something changed since the last pass."""
        self._last_s = -inf
        self._shares_s = -inf
        self.retry_at_s = inf
        """The earliest time at which the last pass's refusals may change although nothing happens until then."""
        self._reserves_later = False
        """Whether a workload of the last pass has not waited long enough for a reservation that a region could give."""
        self._over_quota_tenants: set[str] = set()
        """Tenants with over-quota work, which their own workloads spare: their refusals say nothing about others."""
        self.standing: ScanOrder | None = None
        """Scan result of the last pass."""
        self._moved_at_s: deque[float] = deque(maxlen=self._settings.moves_per_h)
        """The times of the last moves."""
        self._consolidate_from_s = -inf

    def due_s(self) -> float:
        """Returns the time of the next pass; infinity: nothing waits, and no elastic workload can grow."""
        if not self._transitions.queue and not (self._settings.grow and self._transitions.growers):
            return inf
        soonest_s = self._last_s + self._settings.tick_spacing_s
        if self.news:
            return soonest_s
        return min(self._last_s + self._settings.full_scan_s, max(soonest_s, self.retry_at_s))

    def go(self, now_s: float) -> None:
        """Runs one pass."""
        transitions, engine = self._transitions, self._transitions.engine
        self._last_s, self.news, self.retry_at_s, self._reserves_later = now_s, False, inf, False
        if now_s - self._shares_s >= self._settings.full_scan_s:
            self._shares_s = now_s
            engine.set_tenants(transitions.shares.tenants(now_s))
        self.standing = standing = self._scan(now_s)
        transitions.shares.contested.mark(now_s, standing.waiting)
        self._renew(now_s, standing)
        over_quota = standing.placed[standing.placed_rank >= OVER_QUOTA_RANK].tolist()
        self._over_quota_tenants = {transitions.states[number].workload.tenant for number in over_quota}
        engine.open(now_s)
        if transitions.policy.in_order:
            self._in_order(now_s, standing)
        elif self._ordered is not None:
            for place in self._ordered.turns(standing):
                self._ask(now_s, standing, np.array([place]))
        else:
            self._by_rank(now_s, standing)
        self._consolidate(now_s, standing)
        if self._settings.grow and isinstance(engine, Production):
            self._grow(now_s, engine)

    def shortages(self) -> list[Shortage]:
        """Returns the within-quota workloads that fitted in no region in the last pass, in queue order."""
        if self.standing is None:
            return []
        transitions, everywhere = self._transitions, frozenset(self._transitions.ledgers)
        within = self.standing.order[self.standing.rank < OVER_QUOTA_RANK].tolist()
        states = (transitions.states[number] for number in within if number in transitions.queue)
        return [
            Shortage(state.id, state.workload.jobs, everywhere if state.only is None else state.only)
            for state in islice(states, MOST_SHORTAGES)
        ]

    def _scan(self, now_s: float) -> ScanOrder:
        transitions = self._transitions
        transitions.engine.change(transitions.pending, transitions.placed)
        transitions.pending, transitions.placed = [], []
        standing = transitions.engine.scan(now_s)
        transitions.columns.over_quota[standing.order] = standing.rank >= OVER_QUOTA_RANK
        head = standing.order[:MOST_WAITING].tolist(), standing.rank[:MOST_WAITING].tolist()
        transitions.head = list(zip(*head, strict=True))
        return standing

    def _renew(self, now_s: float, standing: ScanOrder) -> None:
        """Sends changed ranks and checkpoint counts of placed workloads to the regions."""
        columns, numbers = self._transitions.columns, standing.placed
        made = columns.checkpoints_at(numbers, now_s, self._settings.checkpoint_interval_s)
        new = (standing.placed_rank != columns.rank[numbers]) | (made != columns.checkpoints[numbers])
        new &= columns.holds_all[numbers]
        columns.rank[numbers[new]], columns.checkpoints[numbers[new]] = standing.placed_rank[new], made[new]
        for number in numbers[new].tolist():
            self._transitions.report(self._transitions.states[number])

    def _consolidate(self, now_s: float, standing: ScanOrder) -> None:
        """Moves over-quota workloads, so that whole machines become free for gangs that this pass refused."""
        transitions, left = self._transitions, moves_left(now_s, self._moved_at_s, self._settings.moves_per_h)
        if left <= 0 or now_s < self._consolidate_from_s or not isinstance(transitions.engine, Production):
            return
        self._consolidate_from_s = now_s + CONSIDER_S
        queued = (number for number in standing.order.tolist() if number in transitions.queue)
        types = wanted_types(transitions.states[number].workload.jobs for number in islice(queued, MOST_WAITING))
        if not types:
            return
        movers, reserved = self._movers(now_s, standing), transitions.engine.reserved_machines()
        found = (
            consolidation(
                region,
                (ledger.state(one) for one in ledger.machines if ledger.is_open(one) and one not in reserved),
                movers[region],
                types,
                left,
            )
            for region, ledger in transitions.ledgers.items()
            if region in movers
        )
        best = min((one for one in found if one is not None), key=lambda one: one.key, default=None)
        if best is None:
            return
        for mover, plan in zip(best.movers, best.plans, strict=True):
            state = transitions.states[int(mover.workload)]
            request = PlacementRequest(state.id, mover.rank, mover.jobs, tenant=mover.tenant)
            transitions.move(now_s, state, request, plan)
            self._moved_at_s.append(now_s)

    def _grow(self, now_s: float, engine: Production) -> None:
        """Lets at most one elastic workload of each region, and one within-quota workload of each tenant, grow."""
        transitions, columns, s = self._transitions, self._transitions.columns, self._settings
        found = [transitions.states[number] for number in transitions.growers]
        grown, tenants = set[str](), set[str]()
        for state in sorted(found, key=lambda one: (columns.rank[one.number], one.started_at_s, one.number)):
            place, (job,) = state.place, state.workload.jobs
            if state.step is not Step.RUN or place is None or place in grown or state.workload.tenant in tenants:
                continue
            if now_s < state.started_at_s + s.min_runtime_s:
                self.retry_at_s = min(self.retry_at_s, state.started_at_s + s.min_runtime_s)
                continue
            rank, tasks = int(columns.rank[state.number]), round(job.tasks * state.speed)
            types = tuple(state.gpus) if job.gpus_per_task else ()
            request = PlacementRequest(state.id, rank, (replace(job, gpu_types=types),), tenant=state.workload.tenant)
            grower = Grower(request, tasks, state.started_at_s, state.ends_by_s())
            plan = engine.grow(place, grower, state.workload.tenant)
            if plan is not None:
                grown.add(place)
                if rank < OVER_QUOTA_RANK:
                    tenants.add(state.workload.tenant)
                transitions.move(now_s, state, request, plan, "growths")

    def _movers(self, now_s: float, standing: ScanOrder) -> dict[str, list[Mover]]:
        """Returns the workloads that may be moved, by region."""
        out: dict[str, list[Mover]] = defaultdict(list)
        transitions, columns, s = self._transitions, self._transitions.columns, self._settings
        for number in standing.placed[standing.placed_rank >= OVER_QUOTA_RANK].tolist():
            state = transitions.states[number]
            if state.step is not Step.RUN or state.place is None or state.workload.jobs[0].is_elastic:
                continue
            ran_s = now_s - state.started_at_s
            unsaved_s = ran_s - int(columns.checkpoints[number]) * s.checkpoint_interval_s
            if may_move(ran_s, unsaved_s, s.min_runtime_s):
                held, tenant = transitions.ledgers[state.place].holdings(state.id), state.workload.tenant
                rank = int(columns.rank[number])
                out[state.place].append(
                    Mover(state.id, state.attempt, rank, state.workload.jobs, held, unsaved_s, tenant)
                )
        return out

    def _by_rank(self, now_s: float, standing: ScanOrder) -> None:
        waited_s = self._waited_s(now_s, standing)
        reserve_after_s = self._settings.reserve_after_s
        may_reserve = (standing.rank < OVER_QUOTA_RANK) & (reserve_after_s < inf)
        patient = may_reserve & (waited_s > reserve_after_s)
        left = np.arange(len(standing.order))
        taken: set[str] = set()
        size = min(_ASKED, self._settings.batch)
        while len(left):
            batch, left = left[:size], left[size:]
            refused, reserved = self._ask(now_s, standing, batch)
            more_taken = {region for place, region in reserved.items() if patient[place]}
            if not taken.issuperset(more_taken):
                taken.update(more_taken)
                self._withdraw(standing, patient, left, taken)
            hopeless = [place for place in refused if may_reserve[place] and place not in reserved]
            more = self._ask_no_less(standing, left, refused, np.zeros(len(standing.order)))
            # A gang that has waited longer may be able to reserve a region that the refused gang could not.
            as_hopeless = self._ask_no_less(standing, left, hopeless, np.where(patient, waited_s, 0.0))
            left = left[~more | (may_reserve[left] & ~as_hopeless)]
        if self._reserves_later and len(taken) < len(self._transitions.ledgers):
            # Also for workloads that this pass skipped: one may become due for a reservation before those that bid.
            for after_s in reserve_later_s(reserve_after_s):
                near_s = waited_s[may_reserve & (waited_s <= after_s)]
                if len(near_s):
                    self.retry_at_s = min(self.retry_at_s, nextafter(now_s + after_s - float(near_s.max()), inf))

    def _in_order(self, now_s: float, standing: ScanOrder) -> None:
        for place in np.argsort(standing.order):
            if self._ask(now_s, standing, place[None])[0]:
                return

    def _waited_s(self, now_s: float, standing: ScanOrder) -> npt.NDArray[np.float64]:
        """Returns the waiting time by position in the queue; zeros if reservations are disabled."""
        if self._settings.reserve_after_s == inf:
            return np.zeros(len(standing.order))
        states = self._transitions.states
        return now_s - np.array([states[number].workload.submit_s for number in standing.order.tolist()])

    def _ask_no_less(
        self, standing: ScanOrder, left: Ints, than: list[int], waited_s: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.bool_]:
        """Returns which positions of `left` request at least as much as one of `than`, and have not waited longer."""
        if not (than and len(left)):
            return np.zeros(len(left), np.bool_)
        asks = [(standing.order[places], standing.rank[places], waited_s[places]) for places in (left, than)]
        return self._transitions.columns.ask_no_less(*asks[0], *asks[1])

    def _withdraw(self, standing: ScanOrder, patient: npt.NDArray[np.bool_], left: Ints, taken: set[str]) -> None:
        """Clears `patient` for the positions of `left` whose allowed regions all have a patient gang's reservation."""
        states, everywhere = self._transitions.states, frozenset(self._transitions.ledgers)
        for place in left[patient[left]].tolist():
            only = states[int(standing.order[place])].only
            patient[place] = not (everywhere if only is None else only) <= taken

    def _ask(self, now_s: float, standing: ScanOrder, batch: Ints) -> tuple[list[int], dict[int, str]]:
        """Offers a batch to the regions, and awards their bids.

        Returns:
            The queue positions whose refusal implies the refusal of every workload that requests at least as much; and
            the reserved regions, by the queue position of the workload that reserved them.
        """
        transitions = self._transitions
        candidates: list[Candidate] = []
        states: list[WorkloadState] = []
        for place in batch.tolist():
            state = transitions.states[int(standing.order[place])]
            ranked = standing.ranked(place)
            jobs = state.workload.jobs
            if self._ordered is None:
                jobs = tuple(
                    job if job.gpu_types == types else replace(job, gpu_types=types)
                    for job, types in zip(jobs, ranked.gpu_types, strict=True)
                )
                if ranked.most_tasks:
                    jobs = (replace(jobs[0], most_tasks=ranked.most_tasks),)
            displaces = frozenset(ranked.displaces)
            immune = immune_to(state.id, transitions.evictors)
            request = PlacementRequest(state.id, ranked.rank, jobs, immune, displaces, tenant=state.workload.tenant)
            waited_s = now_s - state.workload.submit_s
            candidates.append(
                Candidate(request, state.only, waited_s=waited_s, max_runtime_s=state.workload.max_runtime_s)
            )
            states.append(state)
        refused: list[int] = []
        reserved: dict[int, str] = {}
        for place, state, candidate, outcome in zip(
            batch.tolist(), states, candidates, transitions.engine.place(candidates), strict=True
        ):
            self.retry_at_s = min(self.retry_at_s, outcome.retry_at_s)
            self._reserves_later |= outcome.reserves_at_s < inf
            if outcome.plan is not None:
                transitions.award(now_s, state, candidate.request, outcome.plan, candidate.request.rank)
                # The award makes the displaced workloads over-quota: if they remain, other workloads may evict them.
                self.news |= not candidate.request.displaces.issubset(outcome.plan.victims)
            elif (
                not candidate.request.may_not_evict
                and (candidate.request.rank >= OVER_QUOTA_RANK or state.workload.tenant not in self._over_quota_tenants)
                and candidate.request.jobs == state.workload.jobs
                and len(candidate.request.jobs) == 1
            ):
                # Only for one job: with less free capacity, the first of several jobs may leave room for the next.
                refused.append(place)
            if outcome.reserved is not None:
                reserved[place] = str(outcome.reserved.detail["region"])
        return refused, reserved
