"""When jobs save: the intervals of the systems, with P1 of `reclaim.intervals` for the access link of each machine."""

import numpy as np

from reclaim.allocation import water_fill_links
from reclaim.arrays import Floats
from reclaim.intervals import intervals, phases
from simulation.reclaim.knowledge import Knowledge
from simulation.reclaim.oracle import Truth, best_intervals
from simulation.reclaim.scenario import Scenario
from simulation.reclaim.state import Job, Node
from simulation.reclaim.systems import Saving, System

LEAST_S = 60.0
"""No system saves more often: a job's steps and the commit of a checkpoint take their time."""


class Saver:
    """Sets the intervals of all running jobs of one system."""

    def __init__(self, scenario: Scenario, system: System, knowledge: Knowledge, nodes: list[Node]) -> None:
        """All jobs of a machine share its access link."""
        self._scenario, self._system, self._knowledge, self._nodes = scenario, system, knowledge, nodes
        self._truth = Truth(scenario)
        self._offsets_s = phases(np.arange(len(scenario.work), dtype=np.uint64)) * system.parameters.p1.stagger_s

    def set_intervals(self, jobs: list[Job], now_s: float) -> None:
        """Sets `interval_s` of the running jobs."""
        if self._system.saving is Saving.FIXED:
            for job in jobs:
                job.interval_s = self._system.interval_s
            return
        if jobs:
            for job, interval_s in zip(jobs, self._of(jobs, now_s).tolist(), strict=True):
                job.interval_s = max(interval_s, LEAST_S)

    def _of(self, jobs: list[Job], now_s: float) -> Floats:
        parameters, traffic, know = self._system.parameters, self._scenario.traffic, self._knowledge
        payload = np.array([job.checkpoint_bytes for job in jobs]) * (1 + traffic.overhead_share)
        at = np.array([job.node for job in jobs])
        if self._system.saving is Saving.ORACLE:
            found = np.empty(len(jobs))
            for machine in np.unique(at).tolist():
                gpus = np.array([job.gpus for job in jobs if job.node == machine])
                own = best_intervals(self._truth, machine, gpus, payload[at == machine], now_s, parameters)
                found[at == machine] = own
            return found
        if self._system.saving is Saving.P1:
            hazard, budget = know.upper_per_h(now_s), know.budget_bytes_s(now_s)
        else:
            # pi_ind: the same allocation and limits, but from the means of the last day.
            hazard, budget = know.day_upper_per_h(now_s), know.day_budget_bytes_s(now_s)
        links = (1 - parameters.research_share) * budget[self._scenario.row_of[: len(self._nodes)]]
        allocated = water_fill_links(hazard[at], payload, traffic.write_bytes_s, links, at)
        return intervals(hazard[at], payload, allocated, parameters.loss_budget_s, parameters.p1.write_share).interval_s

    def offset_s(self, job: Job) -> float:
        """Returns the offset of a job's checkpoints, which keeps those of a building apart."""
        return float(self._offsets_s[job.number])
