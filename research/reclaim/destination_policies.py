"""Where jobs go: the destination policies of the systems (`research.reclaim.algorithm_2`, `research.reclaim.joint`)."""

from math import inf

import numpy as np

from reclaim.arrays import Floats
from research.reclaim.algorithm_2 import Nodes, choose
from research.reclaim.destinations import Leaving, Network
from research.reclaim.estimates import SiteKnowledge
from research.reclaim.joint import EarlyMoves, Outlook, choose_jointly, early_moves
from research.reclaim.scenario import LendingScenario
from research.reclaim.state import NOWHERE, Job, Node
from research.reclaim.systems import Choosing, System
from research.reclaim.topology import Links, Topology
from research.reclaim.true_rates import Truth, assign_jobs

_CORE_BYTES_S = 1.25e9


class Chooser:
    """Chooses destinations for one system."""

    def __init__(
        self, scenario: LendingScenario, system: System, knowledge: SiteKnowledge, nodes: list[Node], seed: int
    ) -> None:
        """`seed` is that of random destinations."""
        self._scenario, self._system, self._knowledge, self._nodes = scenario, system, knowledge, nodes
        self._rng = np.random.default_rng([seed, 77])
        given = system.parameters.restart_s
        self.restart_s = scenario.restart_s if given is None else given
        self._truth = Truth(scenario)

    def destinations(self, jobs: list[Job], now_s: float, notice_s: float) -> list[int]:
        """Returns a machine for each job, or NOWHERE. `notice_s` is infinite for jobs that already lost theirs."""
        kind = self._system.choosing
        if kind is Choosing.HOME:
            return [NOWHERE] * len(jobs)
        if kind in (Choosing.RANDOM, Choosing.FIRST):
            return self._simple(jobs)
        if kind is Choosing.TRUE_RATES:
            return assign_jobs(self._truth, self._nodes, jobs, now_s, notice_s, self._system.parameters)
        leaving = self._leaving(jobs, notice_s)
        network, nodes = self._network(now_s), self._columns()
        rules = self._system.parameters.rules
        if kind is Choosing.JOINT:
            outlook = self._outlook(jobs, now_s, inf)
            found = choose_jointly(network, nodes, leaving, outlook, rules, self._system.parameters.policy)
            return [int(one) for one in found.choices.destination]
        survival = np.array([np.exp(-sum(self._knowledge.expected(now_s, self._left_s(job)))) for job in jobs])
        return [int(one) for one in choose(network, nodes, leaving, survival, rules).destination]

    def early(self, jobs: list[Job], now_s: float) -> EarlyMoves:
        """Returns the moves that are expected to pay."""
        parameters = self._system.parameters
        moved_s = np.full((len(jobs), max(parameters.policy.most_per_day, 1)), -np.inf)
        for row, job in enumerate(jobs):
            recent = job.moved_s[-moved_s.shape[1] :]
            moved_s[row, : len(recent)] = recent
        return early_moves(
            self._network(now_s), self._columns(), self._leaving(jobs, inf),
            self._outlook(jobs, now_s, parameters.early_horizon_s), moved_s, now_s, parameters.rules, parameters.policy,
        )  # fmt: skip

    def upload_s(self, job: Job, now_s: float) -> float:
        """Returns the time that a final checkpoint to the building's store is expected to take.

        It is only tried if the job cannot move, and costs nothing if it fails, so no lower bound is needed.
        """
        path = self._scenario.row_of[list(self._scenario.upload(job.node, self._nodes[job.node].building))]
        bandwidth = float(self._knowledge.budget_bytes_s(now_s)[path].min())
        share = 1 - self._system.parameters.research_share if self._system.is_shaped else 1.0
        return self._wire(job) / max(bandwidth * share, 1.0)

    def _simple(self, jobs: list[Job]) -> list[int]:
        taken = dict.fromkeys(range(len(self._nodes)), 0)
        found = []
        for job in jobs:
            fitting = [
                node.number for node in self._nodes
                if node.number != job.node and node.takes(job) and node.free - taken[node.number] >= job.gpus
            ]  # fmt: skip
            if not fitting:
                found.append(NOWHERE)
                continue
            first = self._system.choosing is Choosing.FIRST
            found.append(fitting[0 if first else int(self._rng.integers(len(fitting)))])
            taken[found[-1]] += job.gpus
        return found

    def _left_s(self, job: Job) -> float:
        return max(job.work_s - job.progress_s, 1.0)

    def _wire(self, job: Job) -> float:
        return job.checkpoint_bytes * (1 + self._scenario.traffic.overhead_share)

    def _leaving(self, jobs: list[Job], notice_s: float) -> Leaving:
        # A job needs whole GPUs of enough memory each. So "memory" is the number of free GPUs, and "capability" is the
        # memory of one.
        return Leaving.of(
            [job.node for job in jobs],
            checkpoint_bytes=[self._wire(job) for job in jobs],
            memory_bytes=[float(job.gpus) for job in jobs],
            capability=[job.memory_bytes for job in jobs],
            notice_s=notice_s,
            restart_s=self.restart_s,
        )

    def _columns(self) -> Nodes:
        usable = np.array([node.is_lent and node.leaves_s == inf for node in self._nodes])
        gpus = np.array([node.gpus for node in self._nodes], np.float64)
        free = np.array([node.free for node in self._nodes], np.float64)
        memory = np.array([node.memory_bytes for node in self._nodes])
        return Nodes.of(
            len(self._nodes), memory_bytes=free, capability=memory, load=np.where(usable, (gpus - free) / gpus, inf)
        )

    def _share(self, now_s: float) -> Floats:
        """Returns, for each link, the lower bound of the bandwidth that a transfer gets."""
        bound = self._knowledge.links_bytes_s(now_s)[self._scenario.row_of]
        share = 1 - self._system.parameters.research_share if self._system.is_shaped else 1.0
        return np.asarray(np.maximum(bound * share, 1.0))

    def _network(self, now_s: float) -> Network:
        count, links = len(self._scenario.buildings), self._share(now_s)
        up, down, shared = np.split(links, np.cumsum([len(self._nodes)] * 2))
        topology = Topology.of(
            [node.building for node in self._nodes],
            [0] * count,
            access=Links.of(up, down),
            distribution=Links.of(shared[count : 2 * count], shared[2 * count :], shared[:count]),
            core=Links.of([_CORE_BYTES_S], _CORE_BYTES_S, _CORE_BYTES_S),
        )
        return Network.direct(topology)

    def _outlook(self, jobs: list[Job], now_s: float, most_s: float) -> Outlook:
        horizons = np.array([min(self._left_s(job), most_s) for job in jobs])
        both = [self._knowledge.expected(now_s, float(horizon_s)) for horizon_s in horizons]
        links = self._share(now_s)
        write = links[: len(self._nodes)]
        emergencies, notices = (np.array(list(each)) for each in zip(*both, strict=True))
        if self._system.as_live:
            write = np.full(len(write), np.median(write))
        return Outlook.of(
            len(jobs),
            len(self._nodes),
            horizon_s=horizons,
            emergencies=emergencies,
            notices=notices,
            write_bytes_s=write,
            loss_budget_s=self._system.parameters.loss_budget_s,
            stall_s=np.array([job.stall_s(self._scenario.traffic.write_bytes_s) for job in jobs]),
        )
