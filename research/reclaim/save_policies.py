"""When jobs save: the intervals of the systems, with P1 of `reclaim.intervals`, and the formula of the SDK."""

from math import sqrt

import numpy as np

from reclaim.allocation import water_fill_links
from reclaim.arrays import Floats
from reclaim.intervals import SiteJobs, Tick, intervals, phases, tick
from research.reclaim.estimates import SiteKnowledge
from research.reclaim.scenario import LendingScenario
from research.reclaim.state import Job, Node
from research.reclaim.systems import IntervalRule, System
from research.reclaim.true_rates import Truth, best_intervals

LEAST_S = 60.0
"""No system saves more often: a job's steps and the commit of a checkpoint take their time."""
FIRST_SAVE_S = 10.0
"""What the SDK assumes that a save costs, until an attempt has made one (`mizzen.cadence.timer`)."""


def own_interval_s(job: Job, write_bytes_s: float) -> float:
    """Returns the interval of the SDK's formula without a coordinator: Young's, because saves are short.

    Daly's correction, whole steps, and the end of the write, for which the next save waits anyway, are left out.
    """
    cost_s = job.stall_s(write_bytes_s) if job.has_saved else FIRST_SAVE_S
    return sqrt(2 * job.mtbf_s * cost_s)


class Saver:
    """Sets the intervals of all running jobs of one system."""

    def __init__(self, scenario: LendingScenario, system: System, knowledge: SiteKnowledge, nodes: list[Node]) -> None:
        """All jobs of a machine share its access link, and all jobs of a building its store."""
        self._scenario, self._system, self._knowledge, self._nodes = scenario, system, knowledge, nodes
        self._truth = Truth(scenario)
        self._seen: tuple[object, ...] = ()
        self._offsets_s = phases(np.arange(len(scenario.work), dtype=np.uint64)) * system.parameters.p1.stagger_s

    def set_intervals(self, jobs: list[Job], now_s: float) -> None:
        """Sets `interval_s` of the running jobs."""
        if self._system.saving is IntervalRule.FIXED:
            for job in jobs:
                job.interval_s = self._system.interval_s
        elif self._system.saving in (IntervalRule.P1, IntervalRule.SDK):
            for job in jobs:
                own_s = own_interval_s(job, self._scenario.traffic.write_bytes_s)
                job.interval_s = max(job.least_s, min(job.most_s, own_s), LEAST_S)
        elif jobs:
            for job, interval_s in zip(jobs, self._of(jobs, now_s).tolist(), strict=True):
                job.interval_s = max(interval_s, LEAST_S)

    def control(self, jobs: list[Job], now_s: float) -> None:
        """One control period of P1, with all running jobs. A job that has not saved keeps its own formula."""
        if self._system.saving is IntervalRule.P1:
            saved = [job for job in jobs if job.has_saved]
            # What is known changes once in an epoch.
            seen = (self._scenario.epoch(now_s), *((job.number, job.started_s) for job in saved))
            if saved and seen != self._seen:
                self._seen = seen
                told = self.told(saved, now_s)
                for job, most_s, least_s in zip(saved, told.interval_s, told.least_s, strict=True):
                    job.most_s, job.least_s = float(most_s), float(least_s)
        self.set_intervals(jobs, now_s)

    def told(self, jobs: list[Job], now_s: float) -> Tick:
        """Returns the save intervals that P1 chooses for jobs, by the calculation of `activities.reclaim.pacing`."""
        parameters, traffic = self._system.parameters, self._scenario.traffic
        at, hazard, links = self._links(jobs, now_s)
        payload = np.array([job.checkpoint_bytes for job in jobs])
        # A save can use what research leaves of the access link of its machine, beside those of the machine's jobs.
        cap = water_fill_links(hazard, payload, traffic.write_bytes_s, links / (1 + traffic.overhead_share), at)
        site = SiteJobs(
            number=np.array([job.number for job in jobs], np.uint64),
            hazard_per_h=hazard,
            checkpoint_bytes=payload,
            loss_budget_s=parameters.loss_budget_s,
            stall_s=np.array([job.stall_s(traffic.write_bytes_s) for job in jobs]),
            store=np.array([self._nodes[job.node].building for job in jobs]),
            cap_bytes_s=np.maximum(cap, 1.0),
        )
        budget_bytes_s = parameters.checkpoint_bytes_s / parameters.p1.write_share
        return tick(site, np.full(len(self._scenario.buildings), budget_bytes_s), parameters.p1)

    def _links(
        self, jobs: list[Job], now_s: float
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Floats, Floats]:
        """Returns the machine of each job, its hazard, and what checkpoints may use of each access link."""
        know = self._knowledge
        at = np.array([job.node for job in jobs])
        if self._system.saving is IntervalRule.MARGINAL:
            # pi_ind: the same allocation and limits, but from the means of the last day.
            hazard, budget = know.day_upper_per_h(now_s), know.day_budget_bytes_s(now_s)
        else:
            hazard, budget = know.upper_per_h(now_s), know.budget_bytes_s(now_s)
        if self._system.parameters.hazard_per_h is not None:
            hazard = np.full(len(self._nodes), self._system.parameters.hazard_per_h)
        access = budget[self._scenario.row_of[: len(self._nodes)]]
        return at, hazard[at], (1 - self._system.parameters.research_share) * access

    def _of(self, jobs: list[Job], now_s: float) -> Floats:
        """Returns the intervals of the systems with published decisions."""
        parameters, traffic = self._system.parameters, self._scenario.traffic
        payload = np.array([job.checkpoint_bytes for job in jobs]) * (1 + traffic.overhead_share)
        if self._system.saving is IntervalRule.TRUE_RATES:
            at = np.array([job.node for job in jobs])
            found = np.empty(len(jobs))
            for machine in np.unique(at).tolist():
                gpus = np.array([job.gpus for job in jobs if job.node == machine])
                own = best_intervals(self._truth, machine, gpus, payload[at == machine], now_s, parameters)
                found[at == machine] = own
            return found
        at, hazard, links = self._links(jobs, now_s)
        allocated = water_fill_links(hazard, payload, traffic.write_bytes_s, links, at)
        return intervals(hazard, payload, allocated, parameters.loss_budget_s, parameters.p1.write_share).interval_s

    def offset_s(self, job: Job) -> float:
        """Returns the offset of a job's checkpoints, which keeps those of a building apart."""
        return float(self._offsets_s[job.number])
