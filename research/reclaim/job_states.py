"""The jobs of one run: they start, save and end, and their GPU time is summed by purpose.

`research.reclaim.engine` adds the owners of machines, who interrupt the jobs.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from research.reclaim.destination_policies import Chooser
from research.reclaim.estimates import SiteKnowledge
from research.reclaim.interruption_rates import Interruptions
from research.reclaim.network import Flow, FlowClass, FlowNetwork
from research.reclaim.records import GpuTotals, SystemOutcome
from research.reclaim.save_policies import Saver
from research.reclaim.scenario import AT_THE_CORE, LendingScenario
from research.reclaim.starts import next_start_s
from research.reclaim.state import NOWHERE, Job, JobPhase, Node
from research.reclaim.systems import Choosing, IntervalRule, StorePlacement, System

WITHIN_S = 600.0
"""A migration succeeds if the job runs again at most this long after its machine left."""


class Running(ABC):
    """The state of a run, with the phases of jobs that do not depend on owners."""

    def __init__(self, scenario: LendingScenario, system: System, knowledge: SiteKnowledge) -> None:
        self._scenario, self._system, self._parameters = scenario, system, system.parameters
        machines, work = scenario.machines, scenario.work
        self._nodes = [
            Node(n, int(machines.building[n]), int(machines.gpus[n]), float(machines.memory_bytes[n]),
                 bool(machines.is_controlled[n]), int(machines.gpus[n]))
            for n in range(len(machines))
        ]  # fmt: skip
        self._jobs = [
            Job(n, int(work.gpus[n]), float(work.work_s[n]), float(work.checkpoint_bytes[n]),
                float(work.memory_bytes[n]))
            for n in range(len(work))
        ]  # fmt: skip
        period_s = 0.0 if system.saving is IntervalRule.TRUE_RATES else self._parameters.traffic_period_s
        self._network = FlowNetwork(scenario, system.is_shaped, self._parameters.research_share, period_s)
        self._chooser = Chooser(scenario, system, knowledge, self._nodes, scenario.seed)
        self._saver = Saver(scenario, system, knowledge, self._nodes)
        self._interruptions = Interruptions(len(scenario.buildings))
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._pushed = 0
        self._now_s = 0.0
        self._flows = 0
        self._held, self._held_since_s = 0, 0.0
        self._totals = GpuTotals()
        self._at_measure: GpuTotals | None = None
        self._queue: list[Job] = []
        self._changed = False
        self._local, self._moves = 0, 0
        self._done: dict[int, Callable[[Flow], None]] = {}
        """What happens when a flow completes, by its number."""
        self._reserved_s: dict[int, float] = {}
        """Since when the GPUs at a job's next machine are reserved."""
        self._noticed_s: dict[int, float] = {}
        """When the last notice of each machine came."""
        self._dirty = False
        """Whether flows have changed since rates were computed."""
        self._outcome = SystemOutcome(
            system.name, scenario.seed, scenario.length_s, scenario.measured_from_s, scenario.lent_gpu_s, WITHIN_S,
            jobs=len(self._jobs),
        )  # fmt: skip

    def _push(self, at_s: float, order: int, event: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (at_s, order, self._pushed, event))

    # GPU time.

    def _hold(self, count: int) -> None:
        self._totals.held += self._held * (self._now_s - self._held_since_s)
        self._held_since_s = self._now_s
        self._held += count

    def _take(self, node: Node, job: Job) -> None:
        node.free -= job.gpus
        node.jobs.add(job.number)
        self._hold(job.gpus)

    def _give(self, node: Node, job: Job) -> None:
        node.free += job.gpus
        node.jobs.discard(job.number)
        self._hold(-job.gpus)
        self._changed = True

    def _end_segment(self, job: Job) -> None:
        """Adds the GPU time of a job's phase, which ends now, to the totals."""
        held_s = self._now_s - job.segment_s
        if job.phase is JobPhase.RUNNING:
            job.advance(self._now_s, self._system.slowdown)
            gained_s = job.progress_s - job.segment_progress_s
            stalled_s = min(job.stalled_s, held_s - gained_s)
            self._totals.useful += gained_s * job.gpus
            self._totals.saving += stalled_s * job.gpus
            self._totals.shadow += (held_s - gained_s - stalled_s) * job.gpus
        elif job.phase in (JobPhase.LOADING, JobPhase.MOVING):
            self._totals.moving += held_s * job.gpus
        job.segment_s, job.segment_progress_s, job.stalled_s = self._now_s, job.progress_s, 0.0

    def _enter(self, job: Job, phase: JobPhase) -> None:
        self._end_segment(job)
        if job.phase is JobPhase.RUNNING:
            early = job.move is not None and job.move.deadline_s == inf
            interrupted = phase is not JobPhase.DONE and not early
            building = self._nodes[job.node].building
            self._interruptions.ended(building, job.started_s, self._now_s, interrupted=interrupted)
        job.phase = phase
        job.version += 1

    def _measure(self) -> None:
        for job in self._jobs:
            if job.phase in (JobPhase.RUNNING, JobPhase.LOADING, JobPhase.MOVING):
                self._end_segment(job)
        self._hold(0)
        self._at_measure = GpuTotals(**vars(self._totals))

    # Jobs start.

    def _submit(self, job: Job) -> None:
        job.phase = JobPhase.WAITING
        self._queue.append(job)
        self._changed = True

    def _dispatch(self) -> None:
        """Starts waiting jobs in the order of submission; a job that does not fit is skipped."""
        self._queue.sort(key=lambda job: job.number)
        for job in list(self._queue):
            if job.eligible_s > self._now_s:
                continue
            fitting = [
                node for node in self._nodes
                if node.takes(job) and (job.home == NOWHERE or job.home == node.number)
            ]  # fmt: skip
            if fitting:
                self._queue.remove(job)
                self._load(job, min(fitting, key=lambda node: (node.free, node.number)))

    def _load(self, job: Job, node: Node, *, is_reserved: bool = False) -> None:
        """Brings a job's newest checkpoint to a machine, and restarts it there."""
        if not is_reserved:
            self._take(node, job)
        self._enter(job, JobPhase.LOADING)
        job.node, job.target = node.number, NOWHERE
        transfers = (
            job.saved_s > 0 and self._system.store is not StorePlacement.OWN_DISK and not self._system.has_shadow
        )
        if not transfers:
            self._restart(job)
            return
        source = node.building if job.saved_at == NOWHERE else job.saved_at
        # The building's store sends it; its traffic is controlled if the receiving machine's agent is.
        flow = self._flow(job, FlowClass.RECOVERY, self._scenario.download(source, node.number), node.is_controlled)
        job.move = flow
        self._done[flow.number] = lambda _: self._loaded(job)

    def _loaded(self, job: Job) -> None:
        job.move = None
        self._restart(job)

    def _restart(self, job: Job) -> None:
        version = job.version
        self._push(self._now_s + self._scenario.restart_s, 2, lambda: self._run_job(job, version))

    def _run_job(self, job: Job, version: int) -> None:
        if job.version != version:
            return
        node = self._nodes[job.node]
        near = [one for one in self._running() if self._nodes[one.node].building == node.building]
        self._enter(job, JobPhase.RUNNING)
        job.since_s = job.last_save_s = job.started_s = self._now_s
        job.mtbf_s = self._interruptions.mtbf_s(node, near, self._now_s)
        job.has_saved, job.most_s, job.least_s = False, inf, 0.0
        if self._system.choosing is Choosing.HOME:
            job.home = job.node
        if job.hit is not None:
            job.hit.resumed_s = self._now_s
            job.hit = None
        self._saver.set_intervals(self._beside(job), self._now_s)
        self._schedule_end(job)
        self._schedule_save(job)
        if node.leaves_s < inf:
            # The notice came while the job was on its way.
            self._plan([job], node.leaves_s)

    def _beside(self, job: Job) -> list[Job]:
        """Returns the running jobs of the job's machine, which share its link."""
        return [one for one in self._running() if one.node == job.node]

    def _running(self) -> list[Job]:
        return [
            self._jobs[n] for node in self._nodes for n in sorted(node.jobs)
            if self._jobs[n].phase is JobPhase.RUNNING and self._jobs[n].node == node.number
        ]  # fmt: skip

    def _schedule_end(self, job: Job) -> None:
        version = job.version
        left_s = (job.work_s - job.progress_s) * (1 + self._system.slowdown)
        self._push(job.since_s + left_s, 2, lambda: self._complete(job, version))

    def _complete(self, job: Job, version: int) -> None:
        if job.version != version or job.phase is not JobPhase.RUNNING:
            return
        if job.work_s - job.progress(self._now_s, self._system.slowdown) > 1e-6:
            self._schedule_end_later(job)
            return
        self._cancel(job)
        self._enter(job, JobPhase.DONE)
        self._give(self._nodes[job.node], job)

    def _schedule_end_later(self, job: Job) -> None:
        version = job.version
        left_s = (job.work_s - job.progress(self._now_s, self._system.slowdown)) * (1 + self._system.slowdown)
        self._push(max(job.since_s, self._now_s) + left_s, 2, lambda: self._complete(job, version))

    def _cancel(self, job: Job) -> None:
        """Ends all transfers of a job, and frees the GPUs that a planned move has reserved."""
        for flow in (job.write, job.move):
            if flow is not None:
                self._network.remove(flow)
                self._done.pop(flow.number, None)
                self._dirty = True
        job.write = job.move = None
        self._unreserve(job)

    def _unreserve(self, job: Job) -> None:
        if job.target != NOWHERE:
            self._book_reserved(job)
            self._give(self._nodes[job.target], job)
            job.target = NOWHERE

    def _book_reserved(self, job: Job) -> None:
        self._totals.moving += (self._now_s - self._reserved_s.pop(job.number)) * job.gpus

    @abstractmethod
    def _plan(self, jobs: list[Job], leaves_s: float) -> None:
        """Chooses destinations for jobs whose machine leaves at `leaves_s`, and begins the moves."""

    # Checkpoints.

    def _schedule_save(self, job: Job) -> None:
        job.save_version += 1
        if job.interval_s == inf or job.write is not None:
            return
        version, save_version = job.version, job.save_version
        due_s = job.last_save_s + job.interval_s
        if self._system.saving in (IntervalRule.P1, IntervalRule.PAPER):
            due_s = float(
                next_start_s(
                    job.last_save_s, job.interval_s, self._saver.offset_s(job), self._parameters.p1.stagger_s
                )
            )  # fmt: skip
        self._push(max(due_s, self._now_s), 2, lambda: self._save(job, version, save_version))

    def _save(self, job: Job, version: int, save_version: int) -> None:
        if (job.version, job.save_version) != (version, save_version) or job.phase is not JobPhase.RUNNING:
            return
        self._begin_save(job, FlowClass.WRITE)

    def _begin_save(self, job: Job, kind: FlowClass) -> None:
        """Takes a snapshot now and sends it to the store."""
        job.advance(self._now_s, self._system.slowdown)
        progress_s = job.progress_s
        stall_s = job.stall_s(self._scenario.traffic.write_bytes_s)
        # A snapshot that begins while the last one still stalls the job adds to its time.
        job.since_s += stall_s
        job.stalled_s += stall_s
        job.save_version += 1
        self._outcome.saves += 1
        if kind is FlowClass.WRITE and self._now_s >= self._scenario.measured_from_s:
            self._outcome.intervals_s.append(self._now_s - job.last_save_s)
        job.last_save_s = self._now_s
        if self._system.store is StorePlacement.OWN_DISK:
            version = job.version
            at_s = self._now_s + job.checkpoint_bytes / self._scenario.traffic.write_bytes_s
            self._push(at_s, 2, lambda: self._saved_locally(job, version, progress_s))
            return
        node = self._nodes[job.node]
        flow = self._flow(job, kind, self._scenario.upload(node.number, self._store(node)), node.is_controlled)
        flow.progress_s = progress_s
        job.write = flow
        self._done[flow.number] = self._saved

    def _saved(self, flow: Flow) -> None:
        job = self._jobs[flow.job]
        job.write = None
        job.saved_s, job.saved_at = flow.progress_s, self._store(self._nodes[job.node])
        if not job.has_saved:
            job.has_saved = True
            if self._system.saving in (IntervalRule.P1, IntervalRule.SDK):
                self._saver.set_intervals([job], self._now_s)
        self._schedule_save(job)

    def _store(self, node: Node) -> int:
        return AT_THE_CORE if self._system.store is StorePlacement.CENTRAL else node.building

    def _saved_locally(self, job: Job, version: int, progress_s: float) -> None:
        if job.version == version and job.phase is JobPhase.RUNNING:
            job.saved_s = progress_s
            self._schedule_save(job)

    def _flow(self, job: Job, kind: FlowClass, path: tuple[int, ...], is_controlled: bool) -> Flow:
        self._flows += 1
        size = job.checkpoint_bytes * (1 + self._scenario.traffic.overhead_share)
        flow = Flow(self._flows, job.number, kind, path, max(size, 1.0), is_controlled, start_s=self._now_s)
        self._network.add(flow)
        self._dirty = True
        return flow

    def _control(self) -> None:
        """One control period of P1."""
        self._push(self._now_s + self._parameters.period_s, 5, self._control)
        running = self._running()
        before = {job.number: job.interval_s for job in running}
        self._saver.control(running, self._now_s)
        for job in running:
            if job.interval_s != before[job.number]:
                self._schedule_save(job)
