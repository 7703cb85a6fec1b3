"""Simulates one system on one scenario: owners come and go, jobs save, move and restart.

Events are processed in the order of their times; of equal times, transfers complete first, and machines leave before
others arrive. Only bandwidth, departures and jobs are given; all else follows from the decisions of the system.
"""

import heapq
from math import inf
from time import perf_counter

from research.reclaim.estimates import SiteKnowledge
from research.reclaim.job_states import Running
from research.reclaim.network import Flow, FlowClass
from research.reclaim.records import GpuTotals, Hit, SystemOutcome
from research.reclaim.scenario import LendingScenario
from research.reclaim.starts import final_feasible
from research.reclaim.state import NOWHERE, Job, JobPhase, Node
from research.reclaim.systems import Choosing, IntervalRule, System

_MARGIN = 1.3
"""A final checkpoint begins when the notice still lasts this multiple of its expected time."""


def simulate(scenario: LendingScenario, system: System, knowledge: SiteKnowledge | None = None) -> SystemOutcome:
    """Returns the outcome of a system on a scenario. The same arguments give the same result.

    `knowledge` can be shared by systems with the same constants of estimation.
    """
    started_s = perf_counter()
    parameters = system.parameters
    if knowledge is None:
        knowledge = SiteKnowledge(
            scenario, parameters.window_days, parameters.hazard_confidence, parameters.bandwidth_confidence,
            parameters.budget_confidence,
        )  # fmt: skip
    outcome = _Run(scenario, system, knowledge).run()
    outcome.wall_s = perf_counter() - started_s
    return outcome


class _Run(Running):
    """A run of one system: the jobs (`job_states.Running`), and owners who lend machines and take them back."""

    def run(self) -> SystemOutcome:
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
        if self._system.saving is not IntervalRule.FIXED:
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

    # Machines come and go.

    def _arrive(self, node: Node) -> None:
        node.is_lent, node.leaves_s = True, inf
        self._changed = True

    def _notice(self, node: Node, leaves_s: float) -> None:
        """A machine's owner has given notice: its jobs get destinations."""
        if not node.is_lent:
            return
        node.leaves_s, self._noticed_s[node.number] = leaves_s, self._now_s
        jobs = [self._jobs[n] for n in sorted(node.jobs)]
        for job in jobs:
            # A planned move to this machine may complete too late, and so may an early move from it: destinations are
            # chosen again.
            if job.target == node.number and job.phase is JobPhase.RUNNING:
                self._drop_move(job)
        staying = [
            job for job in jobs if job.phase is JobPhase.RUNNING and job.node == node.number and job.move is None
        ]
        self._plan(staying, leaves_s)

    def _plan(self, jobs: list[Job], leaves_s: float) -> None:
        """Chooses destinations for jobs whose machine leaves at `leaves_s`, and begins the moves."""
        if not jobs:
            return
        notice_s = leaves_s - self._now_s
        for job in jobs:
            job.advance(self._now_s, self._system.slowdown)
        # Without P2, a destination may be chosen that cannot be reached in time.
        targets = self._chooser.destinations(jobs, self._now_s, notice_s)
        for job, target in zip(jobs, targets, strict=True):
            if target == NOWHERE:
                self._save_at_least(job, leaves_s)
            else:
                self._move(job, self._nodes[target], leaves_s)

    def _move(self, job: Job, target: Node, deadline_s: float) -> None:
        """Reserves a destination and sends the final checkpoint there. `deadline_s` infinite: an early move."""
        source = self._nodes[job.node]
        kind = FlowClass.RECOVERY if deadline_s == inf else FlowClass.PLANNED
        flow = self._flow(job, kind, self._scenario.move(source.number, target.number), source.is_controlled)
        flow.deadline_s, flow.rest_s = deadline_s, self._chooser.restart_s
        self._take(target, job)
        self._reserved_s[job.number] = self._now_s
        job.target, job.move = target.number, flow
        self._done[flow.number] = self._moved
        if self._system.is_shaped and kind is FlowClass.PLANNED and flow.is_controlled:
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
        if job.move is not flow or job.phase is not JobPhase.RUNNING:
            return
        if flow.start_s > self._now_s:
            self._push(flow.start_s, 0, lambda: self._stop_to_move(job, flow))
            return
        if job.write is not None:
            self._network.remove(job.write)
            self._done.pop(job.write.number, None)
            job.write = None
        self._enter(job, JobPhase.MOVING)
        flow.progress_s = job.progress_s
        job.stopped_s = self._now_s
        self._dirty = True

    def _moved(self, flow: Flow) -> None:
        """The final checkpoint has arrived."""
        job = self._jobs[flow.job]
        source, target = self._nodes[job.node], self._nodes[job.target]
        self._enter(job, JobPhase.LOADING)
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
        """P3 does not admit a planned migration: the job continues until its machine leaves."""
        job = self._jobs[flow.job]
        self._done.pop(flow.number, None)
        job.move = None
        self._unreserve(job)
        self._save_at_least(job, flow.deadline_s)

    def _save_at_least(self, job: Job, leaves_s: float) -> None:
        """P1, for a job that cannot move within its notice: a final checkpoint to the store, if that alone fits.

        The checkpoint begins as late as is safe, so that it contains most of the work. If the notice is long enough for
        two checkpoints, another one begins at once: if the bandwidth falls later, that one is complete.
        """
        if self._system.saving is IntervalRule.FIXED or job.phase is not JobPhase.RUNNING:
            return
        upload_s = self._chooser.upload_s(job, self._now_s)
        version = job.version
        if final_feasible(upload_s, 1.0, 0.0, leaves_s - self._now_s):
            safe_s = _MARGIN * upload_s
            latest_s = max(self._now_s, leaves_s - safe_s)
            if job.write is None and latest_s - self._now_s >= safe_s:
                self._begin_save(job, FlowClass.RECOVERY)
            self._push(latest_s, 2, lambda: self._last_save(job, version))

    def _last_save(self, job: Job, version: int) -> None:
        if job.version != version or job.phase is not JobPhase.RUNNING or job.move is not None:
            return
        if job.write is not None:
            if job.write.kind is FlowClass.RECOVERY:
                # The first one is already late, and a new one would complete later still.
                return
            self._network.remove(job.write)
            self._done.pop(job.write.number, None)
        self._begin_save(job, FlowClass.RECOVERY)

    def _drop_move(self, job: Job) -> None:
        """Ends a planned move whose destination is no longer there. The job continues on its machine."""
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
            elif job.phase in (JobPhase.RUNNING, JobPhase.MOVING):
                lost.append(job)
                self._lose(job, node, notice_s)
            else:
                self._cancel(job)
                self._enter(job, JobPhase.WAITING)
                self._give(node, job)
                lost.append(job)
        self._recover(lost)

    def _target_lost(self, job: Job) -> None:
        """The destination of a planned move left. If the job has stopped already, it continues at its machine."""
        if job.phase is JobPhase.MOVING:
            if job.move is not None:
                self._network.remove(job.move)
                self._done.pop(job.move.number, None)
            job.move = None
            self._unreserve(job)
            self._enter(job, JobPhase.RUNNING)
            job.since_s = job.started_s = self._now_s
            self._schedule_end(job)
            self._schedule_save(job)
            source = self._nodes[job.node]
            if source.leaves_s < inf:
                self._plan([job], source.leaves_s)
        else:
            self._drop_move(job)

    def _lose(self, job: Job, node: Node, notice_s: float) -> None:
        """Records the work and the time that a job loses by a departure."""
        hit = self._hit(job, node, self._now_s, notice_s)
        hit.stopped_s = job.stopped_s if job.phase is JobPhase.MOVING else self._now_s
        self._end_segment(job)
        hit.lost_s = job.progress_s - job.saved_s
        if notice_s == 0:
            size = job.checkpoint_bytes * (1 + self._scenario.traffic.overhead_share)
            row = self._scenario.row_of[node.number]
            bandwidth = float(self._scenario.links_bytes_s[row, self._scenario.step(self._now_s)])
            hit.clairvoyant_s = min(hit.lost_s, size / min(bandwidth, self._scenario.traffic.write_bytes_s))
        target = job.target
        reserved = self._nodes[target] if target != NOWHERE and self._nodes[target].is_lent else None
        if reserved is not None and reserved.leaves_s == inf:
            self._book_reserved(job)
            job.target = NOWHERE
        else:
            reserved = None
        self._cancel(job)
        self._enter(job, JobPhase.WAITING)
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
        waiting = [job for job in jobs if job.phase is JobPhase.WAITING]
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
            job.advance(self._now_s, self._system.slowdown)
        if not jobs:
            return
        found = self._chooser.early(jobs, self._now_s)
        for job, target in zip(jobs, found.destination.tolist(), strict=True):
            if target != NOWHERE and self._nodes[target].takes(job):
                self._outcome.early_moves += self._now_s >= self._scenario.measured_from_s
                self._move(job, self._nodes[target], inf)

    def _finish(self) -> SystemOutcome:
        outcome = self._outcome
        for job in self._jobs:
            if job.target != NOWHERE:
                self._book_reserved(job)
            if job.phase in (JobPhase.RUNNING, JobPhase.LOADING, JobPhase.MOVING):
                self._end_segment(job)
        self._hold(0)
        outcome.whole = self._totals
        outcome.measured = self._totals.minus(self._at_measure or GpuTotals())
        outcome.finished = sum(job.phase is JobPhase.DONE for job in self._jobs)
        outcome.degradation = self._network.all.degradation
        outcome.migration_degradation = self._network.in_migrations.degradation
        outcome.migrated_bytes = self._network.migrated_bytes
        outcome.written_bytes = self._network.written_bytes
        if self._moves:
            outcome.local_share = self._local / self._moves
        return outcome
