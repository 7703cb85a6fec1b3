"""The effects of events on workloads, ledgers, the engine and the metrics."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from domain.lifecycle.attempts import FIRST, Step, StepOutcome
from domain.phases import QUEUED_PHASES, Phase
from domain.scheduling import (
    MachineState,
    PlacedWorkload,
    PlacementRequest,
    Plan,
    QueuedWorkload,
    RunningWorkload,
)
from gms.auction.immunity import immune_to
from gms.columns import QueueChange
from simulation.engine import Engine, Production
from simulation.hardware import Hardware
from simulation.ledger import Ledger
from simulation.meter import Meter, StopCause
from simulation.objectives import Objectives
from simulation.places import added_part, plan_held, repaired, shrunk
from simulation.policies import Binding, SchedulingPolicy, place_of, split_by_cluster
from simulation.random_draws import chance
from simulation.scenario import InitialHolder, Scenario
from simulation.shares import Shares
from simulation.supply import usd_per_h
from simulation.workload_columns import WorkloadColumns
from simulation.workload_state import BOOKED, WorkloadState, gpus_of, numbered, speed_of, types_asked


@dataclass(frozen=True)
class Happened:
    """One event of a run, for observers."""

    at_s: float
    what: str
    workload: str
    place: str | None = None
    detail: tuple[object, ...] = ()


class Transitions:
    """The state of a run: workloads, ledgers and queue, with a method for each event."""

    def __init__(
        self,
        scenario: Scenario,
        policy: SchedulingPolicy,
        engine: Engine,
        meter: Meter,
        later: Callable[[float, str, WorkloadState], None],
        follow: Callable[[Happened], None] | None,
    ) -> None:
        self.scenario, self.settings, self.policy = scenario, scenario.settings, policy
        self.engine, self.meter = engine, meter
        self._later, self._follow = later, follow
        machines = split_by_cluster(scenario.machines) if policy.by_cluster else scenario.machines
        self.ledgers = {place: Ledger(found) for place, found in sorted(machines.items())}
        self.states = numbered(scenario.workloads)
        self.columns = WorkloadColumns(len(self.states))
        self.objectives = Objectives(self.settings, self.columns, meter, later)
        self.evictors: dict[str, set[str]] = {}
        """Workloads that evicted a workload since the last submission or end, by victim (`gms.auction.immunity`)."""
        self.queue: set[int] = set()
        self.head: list[tuple[int, int]] = []
        """The workloads at the head of the queue of the last scan, each with its rank."""
        self.growers: set[int] = set()
        """Placed elastic workloads that have fewer tasks than they may have."""
        self.finished = 0
        self.pending: list[QueueChange[QueuedWorkload]] = []
        """Changes of pending workloads since the last pass; `placed` has those of placed workloads."""
        self.placed: list[QueueChange[PlacedWorkload]] = []
        self._types = {t: k for k, t in enumerate(meter.types)}
        machines_of_all = [m for place in machines.values() for m in place]
        for machine in machines_of_all:
            meter.usd_per_h[machine.capacity] += usd_per_h(machine)
        fleet = sum(m.gpus for m in machines_of_all), sum(m.cpus_milli for m in machines_of_all)
        self.shares = Shares(scenario.tenants, *fleet, scenario.settings.fair_window_s)
        self._binding = Binding(scenario.machines, policy.by_cluster) if policy.binds_early else None
        self._hardware = Hardware(scenario.possible)
        self._cluster_of = {m.id: m.cluster for m in machines_of_all}
        self._count_held()

    # ----------------------------------------------------------------------------------------------------------- events

    def begin_holding(self, state: WorkloadState, held: InitialHolder) -> None:
        """Records a workload that holds all its slots at the start."""
        running = held.running
        place = place_of(held.region, self._cluster_of[running.holdings[0].machine], self.policy.by_cluster)
        state.place, state.attempt, state.gpus = place, 1, dict(held.gpus)
        state.speed = speed_of(state.workload.jobs, running.holdings)
        state.award = plan_held(state, place, self._cluster_of[running.holdings[0].machine], running.holdings)
        state.awarded_at_s = state.ready_at_s = running.started_at_s
        state.idle_since_s, state.start_judged = -inf, True
        state.take(Step.RUN if held.works else Step.PREPARE)
        self.columns.holds_all[state.number] = True
        if self._binding is not None:
            state.only = frozenset((place,))
            self._binding.bound(state.workload, place)
        self.ledgers[place].hold(state.id, running.holdings, taken=True)
        self.placed.append(state.placed(True))
        self._hold(0.0, state, 1)
        if held.works:
            state.started_at_s = running.started_at_s
            state.ran_s += state.started_at_s  # What this attempt ran before 0 is not of an earlier one.
            self.columns.started_at_s[state.number] = state.started_at_s
            self._later(max(0.0, state.started_at_s + state.remaining_s()), "FINISH", state)
        else:
            self._later(self._provisioning_s(state), "START", state)
        self._may_grow(state)
        self.report(state)

    def arrive(self, at_s: float, state: WorkloadState) -> None:
        """Queues a workload that is submitted, or that was queued when the run began."""
        w = state.workload
        self.evictors.clear()
        if self._binding is not None:
            place = self._binding.bind(w)
            state.only = frozenset(() if place is None else (place,))
        elif w.regions is not None:
            state.only = w.regions
        # The maximum runtime matters only for reservations.
        at_most_s = inf if self.settings.reserve_after_s == inf else w.max_runtime_s
        self.columns.asks(state.number, w.jobs, state.only, at_most_s)
        self.meter.arrive(at_s, w.level, self._hardware.has_without_data(w))
        state.idle_since_s, state.start_judged = at_s, False
        state.phase = Phase.PENDING
        self._wait(at_s, at_s, state)
        self._say(at_s, "submitted", state, next(iter(state.only), None) if self._binding and state.only else None)

    def submit(self, at_s: float, state: WorkloadState) -> None:
        """Queues a workload that a person submits during the run: its age begins now."""
        state.workload = replace(state.workload, submit_s=at_s, arrives_s=at_s)
        self.arrive(at_s, state)

    def cancel(self, at_s: float, state: WorkloadState) -> None:
        """Removes a waiting workload from the queue. A workload that holds slots ends when it has started."""
        if state.step is not None:
            state.workload = replace(state.workload, duration_s=state.done_s)
            if state.step is Step.RUN:
                self._later(at_s, "FINISH", state)
        if state.phase not in QUEUED_PHASES:
            return
        self.evictors.clear()
        self._no_longer_queued(state)
        if self._binding is not None:
            self._binding.finished(state.workload)
        state.phase, state.turn = Phase.CANCELLED, state.turn + 1
        self._say(at_s, "cancelled", state)

    def award(self, at_s: float, state: WorkloadState, request: PlacementRequest, plan: Plan, rank: int) -> None:
        """Awards a plan to a workload, and evicts the plan's victims."""
        self.objectives.awarded(at_s, state, rank)
        self._no_longer_queued(state)
        self.ledgers[plan.region].award(plan, request.jobs)
        self._begin(at_s, state, request, plan, rank, "awarded")

    def move(
        self, at_s: float, state: WorkloadState, request: PlacementRequest, plan: Plan, what: StopCause = "moves"
    ) -> None:
        """Books a place for a running workload, and sends it the notice to save and to continue there.

        A workload that grows keeps what it holds of its place, and books the rest.
        """
        assert state.place is not None
        held = self.ledgers[plan.region].held[state.id]
        part, of = added_part(plan, request, held) if what == "growths" else (plan, request)
        self._take(at_s, replace(part, workload=state.booked_id), replace(of, workload=state.booked_id))
        state.booking = plan, request
        self.placed.append(state.placed(True))
        self._send_back(at_s, state, StepOutcome.TOLD, what)
        self.report(state, evictable=False)
        self._say(at_s, "moving" if what == "moves" else "growing", state, state.place)

    def start(self, at_s: float, state: WorkloadState) -> None:
        """Starts the work of a workload after its provisioning."""
        if state.attempt > 1:
            self.meter.restart(at_s, (at_s - state.ready_at_s) * state.held_gpus)
        self.objectives.started(at_s, state)
        state.go_on(StepOutcome.DONE)
        state.started_at_s = at_s
        state.turn += 1
        self.columns.started_at_s[state.number] = at_s
        self._later(at_s + state.remaining_s(), "FINISH", state)
        self.report(state)
        self._say(at_s, "started", state, state.place)

    def finish(self, at_s: float, state: WorkloadState) -> None:
        """Ends a workload whose work is done."""
        state.done_s = state.workload.duration_s
        state.end(Phase.SUCCEEDED)
        self.columns.holds_all[state.number] = False
        self.finished += 1
        self.evictors.clear()
        if self._binding is not None:
            self._binding.finished(state.workload)
        self._say(at_s, "finished", state, state.place)
        self._release(at_s, state)

    def leave(self, at_s: float, state: WorkloadState) -> None:
        """Releases the slots of a workload that was evicted, or that loses a machine, and queues it again.

        A workload that moves continues in its new place.
        """
        if state.started_at_s > -inf:
            state.ran_s += at_s - state.started_at_s
        if state.booking is not None:
            ledger, (plan, _) = self.ledgers[state.place or ""], state.booking
            if all(ledger.is_open(machine) for job in plan.jobs for machine, _ in job.machines):
                self._go_on_where_booked(at_s, state)
                return
            self._end_booking(state)
        if state.damaged and self.settings.repair and self._repair(at_s, state):
            return
        evictor, state.evictor = state.evictor, None
        state.end(Phase.PREEMPTED)
        self._release(at_s, state)
        if evictor is None or not self._shrink(at_s, state):
            state.place = None
            self._say(at_s, "left", state)
            self._wait(at_s, state.objective_since_s, state)
        if evictor is None:
            return
        self.states[evictor].victims.remove(state.number)
        if not self.states[evictor].victims:
            self._ready(at_s, self.states[evictor])

    def join(self, region: str, machine: MachineState) -> None:
        """Adds a machine; passes use it from the next one on."""
        self.ledgers[region].join(machine)
        self.engine.join(region, machine)
        self._count_held()

    def interrupt(self, at_s: float, region: str, machine: str, *, lost: bool = False) -> None:
        """Closes a machine that will end, and sends its workloads the notice to save and leave.

        If it is `lost` without notice, the work since the last periodic checkpoint is lost. Workloads that are already
        leaving are not affected. A workload that still waits for its victims on the machine leaves as soon as they have
        left.
        """
        self.engine.close(region, machine)
        for holder in self.ledgers[region].close(machine):
            state = self.states[int(holder.removesuffix(BOOKED))]
            if holder == state.booked_id:
                self._end_booking(state)
                self.placed.append(state.placed(True))
            elif self.columns.holds_all[state.number]:
                state.damaged = lost
                self._interrupt(at_s, state)
        self._count_held()

    def is_idle(self, region: str, machine: str) -> bool:
        """Returns whether no workload holds resources of a machine."""
        return self.ledgers[region].is_idle(machine)

    def report(self, state: WorkloadState, *, evictable: bool = True) -> None:
        """Sends the state of a workload that holds all its slots to its region."""
        assert state.place is not None
        number, s = state.number, self.settings
        since_s = max(state.awarded_at_s, state.started_at_s)
        made = int(self.columns.checkpoints[number])
        self.engine.running(
            state.place,
            RunningWorkload(
                state.id,
                int(self.columns.rank[number]),
                since_s,
                self.ledgers[state.place].holdings(state.id),
                state.started_at_s + made * s.checkpoint_interval_s if made else None,
                evictable,
                protected_until_s=since_s + s.min_runtime_s if s.min_runtime_s and not state.moved else -inf,
                attempt=state.attempt,
                # An upper bound, as live: the runtime of earlier attempts is not subtracted.
                ends_by_s=since_s + state.workload.max_runtime_s,
                tenant=state.workload.tenant,
            ),
        )

    # ---------------------------------------------------------------------------------------------------------- details

    def _begin(
        self, at_s: float, state: WorkloadState, request: PlacementRequest, plan: Plan, rank: int, what: str
    ) -> None:
        """Begins an attempt in a place that was taken for it, and evicts the plan's victims."""
        state.take(FIRST)
        state.place, state.gpus = plan.region, gpus_of(plan, request)
        state.award, state.damaged = (plan, request), False
        state.speed = plan.jobs[0].tasks / state.workload.jobs[0].tasks
        self.columns.begin(state.number, rank)
        state.attempt += 1
        state.turn += 1
        state.awarded_at_s, state.started_at_s = at_s, -inf
        self.objectives.remind(at_s, state)
        self._hold(at_s, state, 1)
        self.placed.append(state.placed(True))
        self._may_grow(state)
        state.moved = what == "moved"
        state.victims = {int(victim) for victim in plan.victims}
        self._say(at_s, what, state, plan.region, (tuple(job.machines for job in plan.jobs), plan.victims))
        for number in sorted(state.victims):
            self._evict(at_s, self.states[number], state)
        if not state.victims:
            self._ready(at_s, state)

    def _may_grow(self, state: WorkloadState) -> None:
        """Notes a workload that has fewer tasks than it may have."""
        job = state.workload.jobs[0]
        if job.is_elastic and round(job.tasks * state.speed) < job.most_tasks:
            self.growers.add(state.number)

    def _take(self, at_s: float, plan: Plan, request: PlacementRequest) -> None:
        """Takes the resources of a plan that is not the result of an auction."""
        assert isinstance(self.engine, Production)
        self.engine.book(at_s, plan, request)
        self.ledgers[plan.region].award(plan, request.jobs)

    def _go_on_where_booked(self, at_s: float, state: WorkloadState) -> None:
        assert state.booking is not None
        plan, request = state.booking
        state.end(Phase.PREEMPTED)
        self._release(at_s, state)
        self._end_booking(state)
        self._go_on(at_s, state, plan, request, "moved")

    def _repair(self, at_s: float, state: WorkloadState) -> bool:
        """Lets a gang that has lost a machine continue in place, if it can; returns whether it does."""
        assert state.place is not None
        found = None
        if state.evictor is None:
            rank = int(self.columns.rank[state.number])
            immune = immune_to(state.id, self.evictors)
            found = repaired(state, self.ledgers[state.place], self.engine, rank, immune, at_s)
        if found is None:
            return False
        state.end(Phase.PENDING)
        self._release(at_s, state)
        self._go_on(at_s, state, *found, "repaired")
        return True

    def _shrink(self, at_s: float, state: WorkloadState) -> bool:
        """Lets an elastic workload that was evicted continue with fewer tasks, if it can; returns whether it does."""
        assert state.place is not None
        rank = int(self.columns.rank[state.number])
        waiting = (self.states[number] for number, of in self.head if of < rank and number in self.queue)
        found = shrunk(state, self.ledgers[state.place], self.engine, rank, waiting) if self.settings.shrink else None
        if found is None:
            return False
        assert state.award is not None
        self._go_on(at_s, state, found, state.award[1], "shrunk")
        return True

    def _go_on(self, at_s: float, state: WorkloadState, plan: Plan, request: PlacementRequest, what: str) -> None:
        """Begins the next attempt of a workload at once, without a wait in the queue."""
        self._take(at_s, plan, request)
        self._begin(at_s, state, request, plan, int(self.columns.rank[state.number]), what)

    def _end_booking(self, state: WorkloadState) -> None:
        """Frees the place of a booking."""
        assert state.booking is not None
        place = state.booking[0].region
        self.ledgers[place].leave(state.booked_id)
        self.engine.leave(place, state.booked_id)
        state.booking = None

    def _wait(self, at_s: float, since_s: float, state: WorkloadState) -> None:
        state.objective_since_s, state.judged = since_s, False
        state.turn += 1
        self.queue.add(state.number)
        self.pending.append(state.queued(True))
        self._ask(state, 1)
        self.objectives.remind(at_s, state)

    def _no_longer_queued(self, state: WorkloadState) -> None:
        self.queue.remove(state.number)
        self.pending.append(state.queued(False))
        self._ask(state, -1)

    def _ready(self, at_s: float, state: WorkloadState) -> None:
        state.go_on(StepOutcome.DONE)
        state.ready_at_s = at_s
        self.columns.holds_all[state.number] = True
        self._later(at_s + self._provisioning_s(state), "START", state)
        self.report(state)
        assert state.place is not None
        if self.ledgers[state.place].is_leaving(state.id):
            self._interrupt(at_s, state)

    def _evict(self, at_s: float, victim: WorkloadState, evictor: WorkloadState) -> None:
        self._send_back(at_s, victim, StepOutcome.TOLD, "preemptions")
        victim.evictor = evictor.number
        self.evictors.setdefault(victim.id, set()).add(evictor.id)
        self._say(at_s, "evicted", victim, victim.place, (evictor.workload.id,))

    def _interrupt(self, at_s: float, state: WorkloadState) -> None:
        noticed = state.step is Step.RUN and not state.damaged
        self._send_back(at_s, state, StepOutcome.NOTICED if noticed else StepOutcome.TOLD, "interruptions")
        self.report(state, evictable=False)
        self._say(at_s, "interrupted", state, state.place)

    def _send_back(self, at_s: float, victim: WorkloadState, event: StepOutcome, what: StopCause) -> None:
        """Sends a workload the notice to save, and schedules its departure."""
        s, lost_s = self.settings, 0.0
        if victim.step is Step.RUN:
            victim.idle_since_s, victim.start_judged = at_s, False
            worked_s = at_s - victim.started_at_s
            saved_s = worked_s // s.checkpoint_interval_s * s.checkpoint_interval_s
            if not victim.damaged and self._chance("flush", victim) < s.flush_succeeds:
                saved_s = worked_s
            victim.done_s += saved_s * victim.speed
            lost_s = worked_s - saved_s
        elif s.provisioning_p50_s and victim.attempt > 1:
            self.meter.restart(at_s, (at_s - victim.ready_at_s) * victim.held_gpus)
        self.meter.stop(at_s, what, lost_s * victim.held_gpus, s.eviction_s * victim.held_gpus)
        victim.go_on(event)
        victim.objective_since_s = at_s
        victim.turn += 1
        self.columns.holds_all[victim.number] = False
        self._later(at_s + s.eviction_s, "LEAVE", victim)

    def _release(self, at_s: float, state: WorkloadState) -> None:
        assert state.place is not None
        self.growers.discard(state.number)
        self._hold(at_s, state, -1, count=False)
        self.placed.append(state.placed(False))
        self.ledgers[state.place].leave(state.id)
        self.engine.leave(state.place, state.id)
        self._count_held()

    def _hold(self, at_s: float, state: WorkloadState, sign: int, count: bool = True) -> None:
        w = state.workload
        self.shares.hold(at_s, w.tenant, w.user, round(sign * state.held_gpus), sign * state.held_cpus_milli)
        if count:
            self._count_held()

    def _count_held(self) -> None:
        meter = self.meter
        for k, gpu_type in enumerate(meter.types):
            free = sum(ledger.free_gpus.get(gpu_type, 0) for ledger in self.ledgers.values())
            meter.slots[k] = sum(ledger.gpus.get(gpu_type, 0) for ledger in self.ledgers.values())
            meter.held[k] = meter.slots[k] - free

    def _ask(self, state: WorkloadState, sign: int) -> None:
        self.meter.queued_gpus += sign * state.workload.gpus
        for gpu_type, slots in types_asked(state.workload).items():
            if gpu_type in self._types:
                self.meter.queued[self._types[gpu_type]] += sign * slots

    def _provisioning_s(self, state: WorkloadState) -> float:
        return self.settings.provisioning_s(self._chance("provisioning", state))

    def _chance(self, what: str, state: WorkloadState) -> float:
        return chance(self.scenario.seed, what, f"{state.workload.id}\0{state.attempt}")

    def _say(
        self, at_s: float, what: str, state: WorkloadState, place: str | None = None, detail: tuple[object, ...] = ()
    ) -> None:
        if self._follow is not None:
            self._follow(Happened(at_s, what, state.workload.id, place, detail))
