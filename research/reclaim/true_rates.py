"""The system `true-rates`, which the paper calls the oracle (B6): it knows each epoch's true hazard and bandwidth.

It knows no instant of a departure, and each decision is the best for itself only: it does not foresee the next one. So
it is not a bound, and other systems lose less in some runs. It chooses intervals from 1 to 60 minutes and destinations
with the least expected loss: with OR-Tools where more than two jobs compete, otherwise by enumeration. It may use the
same share of the bandwidth for checkpoints as P1. Its objective is work loss, the number that is judged: the expected
work between a departure and the newest complete checkpoint.
"""

from functools import lru_cache
from math import inf

import numpy as np
from ortools.sat.python import cp_model

from reclaim.arrays import Floats, Ints
from research.reclaim.scenario import EPOCH_S, HOUR_S, STEP_S, LendingScenario
from research.reclaim.state import NOWHERE, Job, Node
from research.reclaim.systems import Parameters

GRID_S = tuple(60.0 * minutes for minutes in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60))
_UNIT = 1_000_000
_AHEAD_S = 24 * 3600.0
"""The horizon of its expectation at a destination."""


class Truth:
    """The true hazards and bandwidths of a scenario."""

    def __init__(self, scenario: LendingScenario) -> None:
        """Sums hazards over epochs, so that any horizon is a difference."""
        self.scenario = scenario
        hours = EPOCH_S / HOUR_S
        zero = np.zeros((len(scenario.machines), 1))
        self.emergencies = np.concatenate((zero, np.cumsum(scenario.emergency_per_h, 1) * hours), axis=1)
        self.notices = np.concatenate((zero, np.cumsum(scenario.notice_per_h, 1) * hours), axis=1)

        self._means: tuple[int, Floats] = (-1, np.zeros(0))

    def links_bytes_s(self, at_s: float) -> Floats:
        """Returns the mean bandwidth of each link in the epoch that contains a time."""
        first = int(at_s // EPOCH_S) * round(EPOCH_S / STEP_S)
        if self._means[0] != first:
            rows = self.scenario.links_bytes_s
            first = min(first, rows.shape[1] - 1)
            self._means = first, rows[:, first : first + round(EPOCH_S / STEP_S)].mean(1)[self.scenario.row_of]
        return self._means[1]

    def expected(self, at_s: float, horizon_s: float) -> tuple[Floats, Floats]:
        """Returns the expected departures of each machine, without and with notice."""
        first = self.scenario.epoch(at_s)
        last = min(self.scenario.epochs, first + max(1, round(horizon_s / EPOCH_S)))
        return (
            self.emergencies[:, last] - self.emergencies[:, first],
            self.notices[:, last] - self.notices[:, first],
        )


def best_intervals(
    truth: Truth, machine: int, gpus: Ints, payload: Floats, now_s: float, parameters: Parameters
) -> Floats:
    """Returns the intervals of the jobs of a machine with the least expected work loss, given their GPUs and payloads.

    Their writes may use the share `write_share` of what research leaves of the machine's access link.
    """
    bandwidth = float(truth.links_bytes_s(now_s)[machine]) * (1 - parameters.research_share)
    budget = bandwidth * parameters.p1.write_share
    if len(payload) == 1:
        fitting = [one for one in GRID_S if payload[0] / one <= budget]
        return np.array([fitting[0] if fitting else max(GRID_S[-1], payload[0] / budget)])
    # Rounded, so that neighbouring epochs find the same solution in the cache.
    loads = tuple(tuple(round(float(size) / one / budget, 3) for one in GRID_S) for size in payload)
    return np.array(_solve(loads, tuple(gpus.tolist())))


@lru_cache(maxsize=20_000)
def _solve(loads: tuple[tuple[float, ...], ...], gpus: tuple[int, ...]) -> tuple[float, ...]:
    least = sum(row[-1] for row in loads)
    room = max(1.0, least)
    if len(loads) == 2:
        first, second = np.array(loads[0])[:, None], np.array(loads[1])[None, :]
        grid = np.array(GRID_S)
        cost = gpus[0] * grid[:, None] + gpus[1] * grid[None, :]
        pair = np.unravel_index(int(np.argmin(np.where(first + second <= room + 1e-9, cost, np.inf))), cost.shape)
        return GRID_S[int(pair[0])], GRID_S[int(pair[1])]
    model = cp_model.CpModel()
    chosen = [[model.new_bool_var("") for _ in GRID_S] for _ in loads]
    for row in chosen:
        model.add_exactly_one(row)
    model.add(
        sum(round(load * _UNIT) * var for loads_of, row in zip(loads, chosen, strict=True)
            for load, var in zip(loads_of, row, strict=True))
        <= int(room * _UNIT) + len(loads)
    )  # fmt: skip
    model.minimize(
        sum(round(count * interval) * var for count, row in zip(gpus, chosen, strict=True)
            for interval, var in zip(GRID_S, row, strict=True))
    )  # fmt: skip
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return (GRID_S[-1],) * len(loads)
    return tuple(
        next(interval for interval, var in zip(GRID_S, row, strict=True) if solver.value(var)) for row in chosen
    )


def assign_jobs(
    truth: Truth, nodes: list[Node], jobs: list[Job], now_s: float, notice_s: float, parameters: Parameters
) -> list[int]:
    """Returns the destinations with the least expected loss; NOWHERE where no machine has room in time."""
    scenario = truth.scenario
    costs, links = np.full((len(jobs), len(nodes)), inf), truth.links_bytes_s(now_s)
    for row, job in enumerate(jobs):
        left_s = min(max(job.work_s - job.progress_s, 1.0), _AHEAD_S)
        emergencies, notices = truth.expected(now_s, left_s)
        size = job.checkpoint_bytes * (1 + scenario.traffic.overhead_share)
        again_s = job.interval_s / 2 if job.interval_s < inf else parameters.loss_budget_s
        for node in nodes:
            if node.number == job.node or not node.takes(job):
                continue
            slowest = float(links[list(scenario.move(job.node, node.number))].min())
            time_s = size / max(slowest * (1 - parameters.research_share), 1.0) + scenario.restart_s
            if time_s > notice_s:
                continue
            number = node.number
            costs[row, number] = time_s * 0.1 + emergencies[number] * (again_s + time_s) + notices[number] * time_s
    if len(jobs) == 1:
        return [int(np.argmin(costs[0])) if np.isfinite(costs[0]).any() else NOWHERE]
    return _assign(costs, nodes, jobs)


def _assign(costs: Floats, nodes: list[Node], jobs: list[Job]) -> list[int]:
    model = cp_model.CpModel()
    unplaced = float(costs[np.isfinite(costs)].max(initial=1.0)) * 100
    chosen: list[dict[int, cp_model.IntVar]] = []
    terms = []
    for row in range(len(jobs)):
        options = {node: model.new_bool_var("") for node in np.flatnonzero(np.isfinite(costs[row])).tolist()}
        options[NOWHERE] = model.new_bool_var("")
        model.add_exactly_one(options.values())
        terms += [
            round((unplaced if node == NOWHERE else float(costs[row, node])) * 1000) * var
            for node, var in options.items()
        ]
        chosen.append(options)
    for node in nodes:
        model.add(
            sum(job.gpus * options[node.number] for job, options in zip(jobs, chosen, strict=True)
                if node.number in options)
            <= node.free
        )  # fmt: skip
    model.minimize(cp_model.LinearExpr.sum(terms))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [NOWHERE] * len(jobs)
    return [next(node for node, var in options.items() if solver.value(var)) for options in chosen]
