"""What each event does: to the workload, to what is held, to what the decision packages and the meter know."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from domain.phases import QUEUED_PHASES, Phase
from domain.scheduling import (
    MachineState,
    PlacedWorkload,
    PlacementRequest,
    Plan,
    QueuedWorkload,
    RunningWorkload,
)
from gms.columns import Change
from lifecycle.attempts import FIRST, Event, Step
from simulation.board import Board
from simulation.draws import chance
from simulation.engine import Engine
from simulation.ledger import Ledger
from simulation.lives import Life, gpus_of, numbered, types_asked
from simulation.meter import Meter
from simulation.policies import Binding, place_of, split_by_cluster
from simulation.shares import Shares
from simulation.supply.sources import usd_per_h
from simulation.workloads import Hardware
from simulation.world import Held, World


@dataclass(frozen=True)
class Happened:
    """One event, for those who want to follow a run."""

    at_s: float
    what: str
    workload: str
    place: str | None = None
    detail: tuple[object, ...] = ()


class Stage:
    """The workloads of a run, and what holds for them now."""

    def __init__(
        self,
        world: World,
        engine: Engine,
        meter: Meter,
        later: Callable[[float, str, Life], None],
        follow: Callable[[Happened], None] | None,
    ) -> None:
        self.world, self.settings, self.policy = world, world.settings, world.policy
        self.engine, self.meter = engine, meter
        self._later, self._follow = later, follow
        machines = split_by_cluster(world.machines) if world.policy.by_cluster else world.machines
        self.ledgers = {place: Ledger(states) for place, states in sorted(machines.items())}
        self.lives = numbered(world.workloads)
        self.board = Board(len(self.lives))
        self.evictors: dict[str, set[str]] = {}
        """By workload, the workloads that evicted it since the last submission or end (`auction.immunity`)."""
        self.queue: set[int] = set()
        self.finished = 0
        self.pending: list[Change[QueuedWorkload]] = []
        """News for the queue since the last pass; as is `placed`."""
        self.placed: list[Change[PlacedWorkload]] = []
        self._types = {t: k for k, t in enumerate(meter.types)}
        states = [m for place in machines.values() for m in place]
        for state in states:
            meter.usd_per_h[state.capacity] += usd_per_h(state)
        fleet = sum(m.gpus for m in states), sum(m.cpus_milli for m in states)
        self.shares = Shares(world.tenants, *fleet, world.settings.fair_window_s)
        self._binding = Binding(world.machines, world.policy.by_cluster) if world.policy.binds_early else None
        self._hardware = Hardware(world.possible)
        self._cluster_of = {m.id: m.cluster for m in states}
        self._count_held()

    # ----------------------------------------------------------------------------------------------------------- events

    def begin_holding(self, life: Life, held: Held) -> None:
        """A workload that holds all its slots at the start."""
        running = held.running
        place = place_of(held.region, self._cluster_of[running.holdings[0].machine], self.policy.by_cluster)
        life.place, life.attempt, life.gpus = place, 1, dict(held.gpus)
        life.awarded_at_s = life.ready_at_s = running.started_at_s
        life.idle_since_s, life.start_judged = -inf, True
        life.take(Step.RUN if held.works else Step.PREPARE)
        self.board.holds_all[life.number] = True
        if self._binding is not None:
            life.only = frozenset((place,))
            self._binding.bound(life.workload, place)
        self.ledgers[place].hold(life.id, running.holdings, taken=True)
        self.placed.append(life.placed(True))
        self._hold(0.0, life, 1)
        if held.works:
            life.started_at_s = running.started_at_s
            self.board.started_at_s[life.number] = life.started_at_s
            self._later(max(0.0, life.started_at_s + life.remaining_s()), "FINISH", life)
        else:
            self._later(self._provisioning_s(life), "START", life)
        self.tell(life)

    def arrive(self, at_s: float, life: Life) -> None:
        """A workload is submitted, or was in the queue at the start."""
        w = life.workload
        self.evictors.clear()
        if self._binding is not None:
            place = self._binding.bind(w)
            life.only = frozenset(() if place is None else (place,))
        elif w.regions is not None:
            life.only = w.regions
        # How long it may run matters to what is reserved only.
        at_most_s = inf if self.settings.reserve_after_s == inf else w.max_runtime_s
        self.board.asks(life.number, w.jobs, life.only, at_most_s)
        self.meter.arrive(at_s, w.level, self._hardware.has_without_data(w))
        life.idle_since_s, life.start_judged = at_s, False
        life.phase = Phase.PENDING
        self._wait(at_s, at_s, life)
        self._say(at_s, "submitted", life, next(iter(life.only), None) if self._binding and life.only else None)

    def award(self, at_s: float, life: Life, request: PlacementRequest, plan: Plan, rank: int) -> None:
        """A workload has won a place; its victims are told."""
        self._judge(at_s, life, at_s - life.waits_since_s)
        self.meter.wait(at_s, "award", life.workload.level, rank == 8, at_s - life.waits_since_s)
        self._no_longer_queued(life)
        life.take(FIRST)
        life.place, life.gpus = plan.region, gpus_of(plan, request)
        self.board.begin(life.number, rank)
        life.attempt += 1
        life.turn += 1
        life.awarded_at_s, life.started_at_s = at_s, -inf
        self._remind(at_s, life)
        self.ledgers[plan.region].award(plan, request.jobs)
        self._hold(at_s, life, 1)
        self.placed.append(life.placed(True))
        life.victims = {int(victim) for victim in plan.victims}
        detail = tuple(job.machines for job in plan.jobs), plan.victims
        self._say(at_s, "awarded", life, plan.region, detail)
        for number in sorted(life.victims):
            self._evict(at_s, self.lives[number], life)
        if not life.victims:
            self._ready(at_s, life)

    def start(self, at_s: float, life: Life) -> None:
        """Provisioned: it works now."""
        if life.attempt > 1:
            self.meter.restart(at_s, (at_s - life.ready_at_s) * life.workload.gpus)
        idle_s, over_quota = at_s - life.idle_since_s, bool(self.board.rank[life.number] == 8)
        self._judge_start(at_s, life, idle_s, over_quota)
        if life.idle_since_s > -inf:
            self.meter.wait(at_s, "start", life.workload.level, over_quota, idle_s)
        life.go_on(Event.DONE)
        life.started_at_s = at_s
        life.turn += 1
        self.board.started_at_s[life.number] = at_s
        self._later(at_s + life.remaining_s(), "FINISH", life)
        self.tell(life)
        self._say(at_s, "started", life, life.place)

    def finish(self, at_s: float, life: Life) -> None:
        """All its work is done."""
        life.done_s = life.workload.duration_s
        life.end(Phase.SUCCEEDED)
        self.board.holds_all[life.number] = False
        self.finished += 1
        self.evictors.clear()
        if self._binding is not None:
            self._binding.finished(life.workload)
        self._say(at_s, "finished", life, life.place)
        self._release(at_s, life)

    def leave(self, at_s: float, life: Life) -> None:
        """Evicted, or a machine of its own goes: the last of its slots is given up, and it is in the queue again."""
        evictor = life.evictor
        life.end(Phase.PREEMPTED)
        self._release(at_s, life)
        life.evictor, life.place = None, None
        self._say(at_s, "left", life)
        self._wait(at_s, life.waits_since_s, life)
        if evictor is None:
            return
        self.lives[evictor].victims.remove(life.number)
        if not self.lives[evictor].victims:
            self._ready(at_s, self.lives[evictor])

    def run_out(self, at_s: float, life: Life) -> None:
        """The time of its objective is over, and it is still queued, or at least does not work."""
        over_quota = bool(self.board.rank[life.number] == 8)
        if life.phase in QUEUED_PHASES:
            over_quota = bool(self.board.over_quota[life.number])
            if at_s >= life.waits_since_s + self._objective_s(life):
                self._judge(at_s, life, inf)
        if at_s >= life.idle_since_s + self._objective_s(life):
            self._judge_start(at_s, life, inf, over_quota)

    def join(self, region: str, machine: MachineState) -> None:
        """A machine is there from now on; it is looked at from the next pass on."""
        self.ledgers[region].join(machine)
        self.engine.join(region, machine)
        self._count_held()

    def interrupt(self, at_s: float, region: str, machine: str) -> None:
        """A machine goes: it takes nothing new, and who is there gets notice to save and leave.

        Who is on its way out already goes on with that. Who still waits for its victims there leaves when they have.
        """
        self.engine.close(region, machine)
        for holder in self.ledgers[region].close(machine):
            life = self.lives[int(holder)]
            if self.board.holds_all[life.number]:
                self._interrupt(at_s, life)
        self._count_held()

    def is_idle(self, region: str, machine: str) -> bool:
        """Whether nobody holds anything of a machine that has joined."""
        return self.ledgers[region].is_idle(machine)

    def tell(self, life: Life, *, evictable: bool = True) -> None:
        """The regions learn what there is to know of a workload that holds all its slots."""
        assert life.place is not None
        number, s = life.number, self.settings
        since_s = max(life.awarded_at_s, life.started_at_s)
        made = int(self.board.checkpoints[number])
        self.engine.running(
            life.place,
            RunningWorkload(
                life.id,
                int(self.board.rank[number]),
                since_s,
                self.ledgers[life.place].holdings(life.id),
                life.started_at_s + made * s.checkpoint_interval_s if made else None,
                evictable,
                protected_until_s=since_s + s.min_runtime_s if s.min_runtime_s else -inf,
                attempt=life.attempt,
                ends_by_s=life.ready_at_s + life.workload.max_runtime_s,
            ),
        )

    # ---------------------------------------------------------------------------------------------------------- details

    def _wait(self, at_s: float, since_s: float, life: Life) -> None:
        life.waits_since_s, life.judged = since_s, False
        life.turn += 1
        self.queue.add(life.number)
        self.pending.append(life.queued(True))
        self._ask(life, 1)
        if self._objective_s(life) < inf:
            self._later(max(at_s, since_s + self._objective_s(life)), "OBJECTIVE", life)
        self._remind(at_s, life)

    def _no_longer_queued(self, life: Life) -> None:
        self.queue.remove(life.number)
        self.pending.append(life.queued(False))
        self._ask(life, -1)

    def _judge(self, at_s: float, life: Life, waited_s: float) -> None:
        if self._objective_s(life) < inf and not life.judged:
            life.judged = True
            over_quota = bool(self.board.over_quota[life.number])
            self.meter.judge(at_s, "award", life.workload.level, over_quota, waited_s > self._objective_s(life))

    def _judge_start(self, at_s: float, life: Life, idle_s: float, over_quota: bool) -> None:
        if self._objective_s(life) < inf and not life.start_judged:
            life.start_judged = True
            self.meter.judge(at_s, "start", life.workload.level, over_quota, idle_s > self._objective_s(life))

    def _objective_s(self, life: Life) -> float:
        return self.settings.objective_s.get(life.workload.level, inf)

    def _remind(self, at_s: float, life: Life) -> None:
        """Come back when its user has waited for it to work as long as its objective, unless that was judged."""
        if not life.start_judged and life.idle_since_s + self._objective_s(life) < inf:
            self._later(max(at_s, life.idle_since_s + self._objective_s(life)), "OBJECTIVE", life)

    def _ready(self, at_s: float, life: Life) -> None:
        life.go_on(Event.DONE)
        life.ready_at_s = at_s
        self.board.holds_all[life.number] = True
        self._later(at_s + self._provisioning_s(life), "START", life)
        self.tell(life)
        assert life.place is not None
        if self.ledgers[life.place].is_leaving(life.id):
            self._interrupt(at_s, life)

    def _evict(self, at_s: float, victim: Life, evictor: Life) -> None:
        self._send_back(at_s, victim, Event.TOLD, by_machine=False)
        victim.evictor = evictor.number
        self.evictors.setdefault(victim.id, set()).add(evictor.id)
        self._say(at_s, "evicted", victim, victim.place, (evictor.workload.id,))

    def _interrupt(self, at_s: float, life: Life) -> None:
        self._send_back(at_s, life, Event.NOTICED if life.step is Step.RUN else Event.TOLD, by_machine=True)
        self.tell(life, evictable=False)
        self._say(at_s, "interrupted", life, life.place)

    def _send_back(self, at_s: float, victim: Life, event: Event, *, by_machine: bool) -> None:
        """Its tasks get notice to save, and it will leave."""
        w, s = victim.workload, self.settings
        lost_s = 0.0
        if victim.step is Step.RUN:
            victim.idle_since_s, victim.start_judged = at_s, False
            worked_s = at_s - victim.started_at_s
            saved_s = worked_s // s.checkpoint_interval_s * s.checkpoint_interval_s
            if chance(self.world.seed, "flush", f"{w.id}\0{victim.attempt}") < s.flush_succeeds:
                saved_s = worked_s
            victim.done_s += saved_s
            lost_s = worked_s - saved_s
        elif s.provisioning_p50_s and victim.attempt > 1:
            self.meter.restart(at_s, (at_s - victim.ready_at_s) * w.gpus)
        self.meter.preempt(at_s, lost_s * w.gpus, s.eviction_s * w.gpus, by_machine=by_machine)
        victim.go_on(event)
        victim.waits_since_s = at_s
        victim.turn += 1
        self.board.holds_all[victim.number] = False
        self._later(at_s + s.eviction_s, "LEAVE", victim)

    def _release(self, at_s: float, life: Life) -> None:
        assert life.place is not None
        self._hold(at_s, life, -1, count=False)
        self.placed.append(life.placed(False))
        self.ledgers[life.place].leave(life.id)
        self.engine.leave(life.place, life.id)
        self._count_held()

    def _hold(self, at_s: float, life: Life, sign: int, count: bool = True) -> None:
        w = life.workload
        self.shares.hold(at_s, w.tenant, sign * w.gpus, sign * sum(job.cpus_milli for job in w.jobs))
        if count:
            self._count_held()

    def _count_held(self) -> None:
        meter = self.meter
        for k, gpu_type in enumerate(meter.types):
            free = sum(ledger.free_gpus.get(gpu_type, 0) for ledger in self.ledgers.values())
            meter.slots[k] = sum(ledger.gpus.get(gpu_type, 0) for ledger in self.ledgers.values())
            meter.held[k] = meter.slots[k] - free

    def _ask(self, life: Life, sign: int) -> None:
        self.meter.queued_gpus += sign * life.workload.gpus
        for gpu_type, slots in types_asked(life.workload).items():
            if gpu_type in self._types:
                self.meter.queued[self._types[gpu_type]] += sign * slots

    def _provisioning_s(self, life: Life) -> float:
        at = chance(self.world.seed, "provisioning", f"{life.workload.id}\0{life.attempt}")
        return self.settings.provisioning_s(at)

    def _say(
        self, at_s: float, what: str, life: Life, place: str | None = None, detail: tuple[object, ...] = ()
    ) -> None:
        if self._follow is not None:
            self._follow(Happened(at_s, what, life.workload.id, place, detail))
