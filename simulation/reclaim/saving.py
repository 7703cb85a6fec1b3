"""When jobs save: the intervals of the systems, with P1 of `reclaim.intervals` for the access link of each machine."""

import numpy as np

from reclaim.allocation import water_fill
from reclaim.intervals import SiteJobs, intervals, phases, tick
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
        by_machine: dict[int, list[Job]] = {}
        for job in jobs:
            by_machine.setdefault(job.node, []).append(job)
        for machine, members in by_machine.items():
            found = self._of(machine, members, now_s)
            for job, interval_s in zip(members, found.tolist(), strict=True):
                job.interval_s = max(interval_s, LEAST_S)

    def _of(self, machine: int, jobs: list[Job], now_s: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        parameters, traffic = self._system.parameters, self._scenario.traffic
        share = 1 - parameters.research_share
        payload = np.array([job.checkpoint_bytes for job in jobs]) * (1 + traffic.overhead_share)
        if self._system.saving is Saving.ORACLE:
            gpus = np.array([job.gpus for job in jobs])
            return best_intervals(self._truth, machine, gpus, payload, now_s, parameters)
        if self._system.saving is Saving.P1:
            site = SiteJobs(
                np.array([job.number for job in jobs], np.uint64),
                self._knowledge.upper_per_h(now_s)[[machine] * len(jobs)],
                payload,
                loss_budget_s=parameters.loss_budget_s,
                cap_bytes_s=traffic.write_bytes_s,
            )
            budget = share * float(self._knowledge.budget_bytes_s(now_s)[self._scenario.row_of[machine]])
            return tick(site, budget, parameters.p1).interval_s
        # pi_ind: the same allocation and limits, but from the means of the last day.
        hazard = self._knowledge.day_upper_per_h(now_s)[[machine] * len(jobs)]
        budget = share * float(self._knowledge.day_budget_bytes_s(now_s)[self._scenario.row_of[machine]])
        allocated = water_fill(hazard, payload, traffic.write_bytes_s, budget)
        return intervals(hazard, payload, allocated, parameters.loss_budget_s, parameters.p1.write_share).interval_s

    def offset_s(self, job: Job) -> float:
        """Returns the offset of a job's checkpoints, which keeps those of a building apart."""
        return float(self._offsets_s[job.number])
