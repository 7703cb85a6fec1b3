"""Simulates one system on one scenario: owners come and go, jobs save, move and restart.

Events are processed in the order of their times; of equal times, transfers complete first, and machines leave before
others arrive. Only bandwidth, departures and jobs are given; all else follows from the decisions of the system.
"""

import heapq
from collections.abc import Callable
from math import inf
from time import perf_counter

from reclaim.intervals import final_feasible, next_start_s
from simulation.reclaim.choosing import Chooser
from simulation.reclaim.knowledge import Knowledge
from simulation.reclaim.network import Flow, Kind, Network
from simulation.reclaim.records import Hit, Outcome, Totals
from simulation.reclaim.saving import Saver
from simulation.reclaim.scenario import Scenario
from simulation.reclaim.state import NOWHERE, Job, Node, Phase
from simulation.reclaim.systems import Choosing, Saving, System

STALL_SHARE = 0.09
"""The share of a local write for which a background save stalls training, as measured by mizzen's bench."""
_MARGIN = 1.3
"""A final checkpoint begins when the notice still lasts this multiple of its expected time."""
WITHIN_S = 600.0
"""A migration succeeds if the job runs again at most this long after its machine left."""


def simulate(scenario: Scenario, system: System, knowledge: Knowledge | None = None) -> Outcome:
    """Returns what a system does on a scenario. The same arguments give the same result.

    `knowledge` can be shared by systems with the same constants of estimation.
    """
    started_s = perf_counter()
    parameters = system.parameters
    if knowledge is None:
        knowledge = Knowledge(
            scenario, parameters.window_days, parameters.hazard_confidence, parameters.bandwidth_confidence,
            parameters.budget_confidence,
        )  # fmt: skip
    outcome = _Run(scenario, system, knowledge).run()
    outcome.wall_s = perf_counter() - started_s
    return outcome


class _Run:
    def __init__(self, scenario: Scenario, system: System, knowledge: Knowledge) -> None:
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
        is_oracle = system.saving is Saving.ORACLE
        period_s = 0.0 if is_oracle else self._parameters.traffic_period_s
        self._network = Network(scenario, system.is_shaped, self._parameters.research_share, period_s)
        self._chooser = Chooser(scenario, system, knowledge, self._nodes, scenario.seed)
        self._saver = Saver(scenario, system, knowledge, self._nodes)
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._pushed = 0
        self._now_s = 0.0
        self._flows = 0
        self._held, self._held_since_s = 0, 0.0
        self._totals = Totals()
        self._at_measure: Totals | None = None
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
        self._outcome = Outcome(
            system.name, scenario.seed, scenario.length_s, scenario.measured_from_s, scenario.lent_gpu_s, WITHIN_S,
            jobs=len(self._jobs),
        )  # fmt: skip

    # Events.

    def _push(self, at_s: float, order: int, event: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (at_s, order, self._pushed, event))

    def run(self) -> Outcome:
        lending = self._scenario.lending
        for n in range(len(lending)):
            node, to_s, notice_s = self._nodes[int(lending.node[n])], float(lending.to_s[n]), float(lending.notice_s[n])
            self._push(float(lending.from_s[n]), 3, lambda node=node: self._arrive(node))  # type: ignore[misc]
            if not lending.departs[n]:
                continue
            if notice_s > 0 and self._system.uses_notice:
                self._push(
                    to_s - notice_s, 4, lambda node=node, to_s=to_s: self._notice(node, to_s)  # type: ignore[misc]
                )  # fmt: skip
            self._push(
                to_s, 1, lambda node=node, notice_s=notice_s: self._leave(node, notice_s)  # type: ignore[misc]
            )  # fmt: skip
        for job in self._jobs:
            at_s = float(self._scenario.work.submit_s[job.number])
            self._push(at_s, 3, lambda job=job: self._submit(job))  # type: ignore[misc]
        self._push(self._scenario.measured_from_s, 0, self._measure)
        if self._system.saving is not Saving.FIXED:
            self._push(self._parameters.period_s, 5, self._control)
        if self._system.moves_early:
            self._push(self._parameters.early_period_s, 6, self._early)
        self._loop()
        return self._finish()

    def _loop(self) -> None:
        end_s = self._scenario.length_s
        while True:
            at_s = min(self._events[0][0] if self._events else inf, self._network.next_s)
            if at_s >= end_s:
                break
            self._now_s = at_s
            dirty = self._network.next_s <= at_s
            for flow in self._network.advance(at_s):
                self._done.pop(flow.number)(flow)
            while self._events and self._events[0][0] <= at_s:
                heapq.heappop(self._events)[3]()
            if self._changed:
                self._changed = False
                self._dispatch()
            if dirty or self._dirty:
                self._dirty = False
                for flow in self._network.recompute(at_s):
                    self._refused(flow)
        self._now_s = end_s
        self._network.advance(end_s)

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
        """Books the GPU time of a job's phase that ends now."""
        held_s = self._now_s - job.segment_s
        if job.phase is Phase.RUNNING:
            progress_s = job.progress(self._now_s, self._system.slowdown)
            gained_s = progress_s - job.segment_progress_s
            stalled_s = min(job.stalled_s, held_s - gained_s)
            self._totals.useful += gained_s * job.gpus
            self._totals.saving += stalled_s * job.gpus
            self._totals.shadow += (held_s - gained_s - stalled_s) * job.gpus
            job.progress_s, job.since_s = progress_s, max(job.since_s, self._now_s)
        elif job.phase in (Phase.LOADING, Phase.MOVING):
            self._totals.moving += held_s * job.gpus
        job.segment_s, job.segment_progress_s, job.stalled_s = self._now_s, job.progress_s, 0.0

    def _enter(self, job: Job, phase: Phase) -> None:
        self._end_segment(job)
        job.phase = phase
        job.version += 1

    def _measure(self) -> None:
        for job in self._jobs:
            if job.phase in (Phase.RUNNING, Phase.LOADING, Phase.MOVING):
                self._end_segment(job)
        self._hold(0)
        self._at_measure = Totals(**vars(self._totals))

    # Jobs start.

    def _submit(self, job: Job) -> None:
        job.phase = Phase.WAITING
        self._queue.append(job)
        self._changed = True

    def _dispatch(self) -> None:
        """Starts waiting jobs in the order of submission; a job that does not fit is passed over."""
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
        self._enter(job, Phase.LOADING)
        job.node, job.target = node.number, NOWHERE
        transfers = job.saved_s > 0 and self._system.saves_to_store and not self._system.has_shadow
        if not transfers:
            self._restart(job)
            return
        source = node.building if job.saved_at == NOWHERE else job.saved_at
        # The building's store sends it; its traffic is controlled if the receiving machine's agent is.
        flow = self._flow(job, Kind.RECOVERY, self._scenario.path(source, node.building), node.is_controlled)
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
        self._enter(job, Phase.RUNNING)
        job.since_s = job.last_save_s = self._now_s
        if self._system.choosing is Choosing.HOME:
            job.home = job.node
        if job.hit is not None:
            job.hit.resumed_s = self._now_s
            job.hit = None
        self._saver.set_intervals([job] if self._system.saving is Saving.FIXED else self._beside(job), self._now_s)
        self._schedule_end(job)
        self._schedule_save(job)
        leaves_s = self._nodes[job.node].leaves_s
        if leaves_s < inf:
            # The notice came while the job was on its way.
            self._plan([job], leaves_s)

    def _beside(self, job: Job) -> list[Job]:
        """Returns the running jobs of the job's building, which share its store."""
        building = self._nodes[job.node].building
        return [one for one in self._running() if self._nodes[one.node].building == building]

    def _running(self) -> list[Job]:
        return [
            self._jobs[n] for node in self._nodes for n in sorted(node.jobs)
            if self._jobs[n].phase is Phase.RUNNING and self._jobs[n].node == node.number
        ]  # fmt: skip

    def _schedule_end(self, job: Job) -> None:
        version = job.version
        left_s = (job.work_s - job.progress_s) * (1 + self._system.slowdown)
        self._push(job.since_s + left_s, 2, lambda: self._complete(job, version))

    def _complete(self, job: Job, version: int) -> None:
        if job.version != version or job.phase is not Phase.RUNNING:
            return
        if job.work_s - job.progress(self._now_s, self._system.slowdown) > 1e-6:
            self._schedule_end_later(job)
            return
        self._cancel(job)
        self._enter(job, Phase.DONE)
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

    # Checkpoints.

    def _schedule_save(self, job: Job) -> None:
        job.save_version += 1
        if job.interval_s == inf or job.write is not None:
            return
        version, save_version = job.version, job.save_version
        due_s = job.last_save_s + job.interval_s
        if self._system.saving is Saving.P1:
            due_s = float(
                next_start_s(
                    job.last_save_s, job.interval_s, self._saver.offset_s(job), self._parameters.p1.stagger_s
                )
            )  # fmt: skip
        self._push(max(due_s, self._now_s), 2, lambda: self._save(job, version, save_version))

    def _save(self, job: Job, version: int, save_version: int) -> None:
        if (job.version, job.save_version) != (version, save_version) or job.phase is not Phase.RUNNING:
            return
        self._begin_save(job, Kind.WRITE)

    def _begin_save(self, job: Job, kind: Kind) -> None:
        """Takes a snapshot now and sends it to the building's store."""
        progress_s = job.progress(self._now_s, self._system.slowdown)
        stall_s = STALL_SHARE * job.checkpoint_bytes / self._scenario.traffic.write_bytes_s
        # A snapshot that begins while the last one still stalls the job adds to its time.
        job.progress_s, job.since_s = progress_s, max(job.since_s, self._now_s) + stall_s
        job.stalled_s += stall_s
        job.save_version += 1
        self._outcome.saves += 1
        if kind is Kind.WRITE and self._now_s >= self._scenario.measured_from_s:
            self._outcome.intervals_s.append(self._now_s - job.last_save_s)
        job.last_save_s = self._now_s
        if not self._system.saves_to_store:
            version = job.version
            at_s = self._now_s + job.checkpoint_bytes / self._scenario.traffic.write_bytes_s
            self._push(at_s, 2, lambda: self._saved_locally(job, version, progress_s))
            return
        node = self._nodes[job.node]
        flow = self._flow(job, kind, self._scenario.path(node.building, node.building), node.is_controlled)
        flow.progress_s = progress_s
        job.write = flow
        self._done[flow.number] = self._saved

    def _saved(self, flow: Flow) -> None:
        job = self._jobs[flow.job]
        job.write = None
        job.saved_s, job.saved_at = flow.progress_s, self._nodes[job.node].building
        self._schedule_save(job)

    def _saved_locally(self, job: Job, version: int, progress_s: float) -> None:
        if job.version == version and job.phase is Phase.RUNNING:
            job.saved_s = progress_s
            self._schedule_save(job)

    def _flow(self, job: Job, kind: Kind, path: tuple[int, ...], is_controlled: bool) -> Flow:
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
        self._saver.set_intervals(running, self._now_s)
        for job in running:
            if job.interval_s != before[job.number]:
                self._schedule_save(job)

    # Machines come and go.

    def _arrive(self, node: Node) -> None:
        node.is_lent, node.leaves_s = True, inf
        self._changed = True

    def _notice(self, node: Node, leaves_s: float) -> None:
        """The owner has said when the machine leaves: its jobs get destinations."""
        if not node.is_lent:
            return
        node.leaves_s, self._noticed_s[node.number] = leaves_s, self._now_s
        jobs = [self._jobs[n] for n in sorted(node.jobs)]
        for job in jobs:
            # A planned move to this machine, or an early one from it, is too late or in doubt: it is chosen anew.
            if job.target == node.number and job.phase is Phase.RUNNING:
                self._drop_move(job)
        staying = [job for job in jobs if job.phase is Phase.RUNNING and job.node == node.number and job.move is None]
        self._plan(staying, leaves_s)

    def _plan(self, jobs: list[Job], leaves_s: float) -> None:
        """Moves jobs within the notice of their machine."""
        if not jobs:
            return
        notice_s = leaves_s - self._now_s
        for job in jobs:
            job.progress_s, job.since_s = (
                job.progress(self._now_s, self._system.slowdown), max(job.since_s, self._now_s)
            )  # fmt: skip
        # Without P2, no one checks whether a destination can be reached in time.
        targets = self._chooser.destinations(jobs, self._now_s, notice_s)
        for job, target in zip(jobs, targets, strict=True):
            if target == NOWHERE:
                self._save_at_least(job, leaves_s)
            else:
                self._move(job, self._nodes[target], leaves_s)

    def _move(self, job: Job, target: Node, deadline_s: float) -> None:
        """Reserves a destination and sends the final checkpoint there. `deadline_s` infinite: an early move."""
        source = self._nodes[job.node]
        kind = Kind.RECOVERY if deadline_s == inf else Kind.PLANNED
        flow = self._flow(job, kind, self._scenario.path(source.building, target.building), source.is_controlled)
        flow.deadline_s, flow.rest_s = deadline_s, self._chooser.restart_s
        self._take(target, job)
        self._reserved_s[job.number] = self._now_s
        job.target, job.move = target.number, flow
        self._done[flow.number] = self._moved
        if self._system.is_shaped and kind is Kind.PLANNED and flow.is_controlled:
            # P3 admits it, and sets its start.
            self._dirty = False
            for one in self._network.recompute(self._now_s):
                self._refused(one)
            if job.move is not flow:
                return
        self._local += source.building == target.building
        self._moves += 1
        if flow.start_s > self._now_s:
            self._push(flow.start_s, 0, lambda: self._stop_to_move(job, flow))
        else:
            self._stop_to_move(job, flow)

    def _stop_to_move(self, job: Job, flow: Flow) -> None:
        if job.move is not flow or job.phase is not Phase.RUNNING:
            return
        if flow.start_s > self._now_s:
            self._push(flow.start_s, 0, lambda: self._stop_to_move(job, flow))
            return
        if job.write is not None:
            self._network.remove(job.write)
            self._done.pop(job.write.number, None)
            job.write = None
        self._enter(job, Phase.MOVING)
        flow.progress_s = job.progress_s
        job.stopped_s = self._now_s
        self._dirty = True

    def _moved(self, flow: Flow) -> None:
        """The final checkpoint has arrived."""
        job = self._jobs[flow.job]
        source, target = self._nodes[job.node], self._nodes[job.target]
        self._enter(job, Phase.LOADING)
        self._book_reserved(job)
        self._give(source, job)
        job.move = None
        job.saved_s, job.saved_at = flow.progress_s, target.building
        job.moved_s.append(self._now_s)
        job.node, job.target = target.number, NOWHERE
        if flow.deadline_s < inf:
            hit = self._hit(job, source, flow.deadline_s, flow.deadline_s - self._noticed_s[source.number])
            hit.handed_over, hit.stopped_s, job.hit = True, job.stopped_s, hit
        self._restart(job)

    def _refused(self, flow: Flow) -> None:
        """P3 does not admit a planned migration: the job runs on until its machine leaves."""
        job = self._jobs[flow.job]
        self._done.pop(flow.number, None)
        job.move = None
        self._unreserve(job)
        self._save_at_least(job, flow.deadline_s)

    def _save_at_least(self, job: Job, leaves_s: float) -> None:
        """P1, for a job that cannot move within its notice: a final checkpoint to the store, if that alone fits.

        It begins as late as is safe, so that it contains most of the work.
        """
        if self._system.saving is Saving.FIXED or job.phase is not Phase.RUNNING:
            return
        upload_s = self._chooser.upload_s(job, self._now_s)
        version = job.version
        if final_feasible(upload_s, 1.0, 0.0, leaves_s - self._now_s):
            latest_s = max(self._now_s, leaves_s - _MARGIN * upload_s)
            self._push(latest_s, 2, lambda: self._last_save(job, version))

    def _last_save(self, job: Job, version: int) -> None:
        if job.version != version or job.phase is not Phase.RUNNING or job.move is not None:
            return
        if job.write is not None:
            self._network.remove(job.write)
            self._done.pop(job.write.number, None)
        self._begin_save(job, Kind.RECOVERY)

    def _drop_move(self, job: Job) -> None:
        """Ends a planned move whose destination is no longer there. The job runs on."""
        if job.move is not None:
            self._network.remove(job.move)
            self._done.pop(job.move.number, None)
            job.move = None
            self._dirty = True
        self._unreserve(job)
        source = self._nodes[job.node]
        if source.leaves_s < inf:
            self._plan([job], source.leaves_s)

    def _leave(self, node: Node, notice_s: float) -> None:
        """A machine leaves. Its jobs continue elsewhere from their newest complete checkpoint."""
        if not node.is_lent:
            return
        node.is_lent, node.leaves_s = False, inf
        lost = []
        for job in [self._jobs[n] for n in sorted(node.jobs)]:
            if job.target == node.number:
                self._target_lost(job)
            elif job.phase in (Phase.RUNNING, Phase.MOVING):
                lost.append(job)
                self._lose(job, node, notice_s)
            else:
                self._cancel(job)
                self._enter(job, Phase.WAITING)
                self._give(node, job)
                lost.append(job)
        self._recover(lost)

    def _target_lost(self, job: Job) -> None:
        """The destination of a planned move left. If the job has stopped already, it continues at its machine."""
        if job.phase is Phase.MOVING:
            if job.move is not None:
                self._network.remove(job.move)
                self._done.pop(job.move.number, None)
            job.move = None
            self._unreserve(job)
            self._enter(job, Phase.RUNNING)
            job.since_s = self._now_s
            self._schedule_end(job)
            self._schedule_save(job)
            source = self._nodes[job.node]
            if source.leaves_s < inf:
                self._plan([job], source.leaves_s)
        else:
            self._drop_move(job)

    def _lose(self, job: Job, node: Node, notice_s: float) -> None:
        """Books what a departure costs a job."""
        hit = self._hit(job, node, self._now_s, notice_s)
        hit.stopped_s = job.stopped_s if job.phase is Phase.MOVING else self._now_s
        self._end_segment(job)
        hit.lost_s = job.progress_s - job.saved_s
        building = node.building
        if notice_s == 0:
            size = job.checkpoint_bytes * (1 + self._scenario.traffic.overhead_share)
            bandwidth = float(self._scenario.links_bytes_s[building, self._scenario.step(self._now_s)])
            hit.clairvoyant_s = min(hit.lost_s, size / min(bandwidth, self._scenario.traffic.write_bytes_s))
        target = job.target
        reserved = self._nodes[target] if target != NOWHERE and self._nodes[target].is_lent else None
        if reserved is not None and reserved.leaves_s == inf:
            self._book_reserved(job)
            job.target = NOWHERE
        else:
            reserved = None
        self._cancel(job)
        self._enter(job, Phase.WAITING)
        self._totals.useful -= hit.lost_s * job.gpus
        self._totals.lost += hit.lost_s * job.gpus
        job.progress_s = job.saved_s
        job.hit = hit
        self._give(node, job)
        if reserved is not None:
            self._load(job, reserved, is_reserved=True)

    def _hit(self, job: Job, node: Node, at_s: float, notice_s: float) -> Hit:
        hit = Hit(job.number, node.number, at_s, notice_s, job.gpus)
        if at_s >= self._scenario.measured_from_s:
            self._outcome.hits.append(hit)
        return hit

    def _recover(self, jobs: list[Job]) -> None:
        """Finds new machines for jobs that lost theirs."""
        waiting = [job for job in jobs if job.phase is Phase.WAITING]
        if self._system.requeue_s > 0 or self._system.choosing is Choosing.HOME:
            for job in waiting:
                job.eligible_s = self._now_s + self._system.requeue_s
                self._queue.append(job)
                self._push(job.eligible_s, 4, self._requeued)
            return
        if not waiting:
            return
        targets = self._chooser.destinations(waiting, self._now_s, inf)
        for job, target in zip(waiting, targets, strict=True):
            if target == NOWHERE:
                self._queue.append(job)
                self._changed = True
                continue
            node = self._nodes[target]
            self._moves += 1
            self._local += node.building == self._nodes[job.node].building
            self._load(job, node)

    def _requeued(self) -> None:
        self._changed = True

    def _early(self) -> None:
        """Moves jobs that are expected to gain from it."""
        self._push(self._now_s + self._parameters.early_period_s, 6, self._early)
        jobs = [job for job in self._running() if job.move is None and self._nodes[job.node].leaves_s == inf]
        for job in jobs:
            job.progress_s, job.since_s = (
                job.progress(self._now_s, self._system.slowdown), max(job.since_s, self._now_s)
            )  # fmt: skip
        if not jobs:
            return
        found = self._chooser.early(jobs, self._now_s)
        for job, target in zip(jobs, found.destination.tolist(), strict=True):
            if target != NOWHERE and self._nodes[target].takes(job):
                self._outcome.early_moves += self._now_s >= self._scenario.measured_from_s
                self._move(job, self._nodes[target], inf)

    def _finish(self) -> Outcome:
        outcome = self._outcome
        for job in self._jobs:
            if job.target != NOWHERE:
                self._book_reserved(job)
            if job.phase in (Phase.RUNNING, Phase.LOADING, Phase.MOVING):
                self._end_segment(job)
        self._hold(0)
        outcome.whole = self._totals
        outcome.measured = self._totals.minus(self._at_measure or Totals())
        outcome.finished = sum(job.phase is Phase.DONE for job in self._jobs)
        outcome.degradation = self._network.all.degradation
        outcome.migration_degradation = self._network.in_migrations.degradation
        outcome.migrated_bytes = self._network.migrated_bytes
        outcome.written_bytes = self._network.written_bytes
        if self._moves:
            outcome.local_share = self._local / self._moves
        return outcome
