"""The omniscient policy: the cheapest plan for a window whose capacity is known in advance (SkyServe, section 3.3)."""

from dataclasses import dataclass
from itertools import pairwise

from ortools.linear_solver import pywraplp

from research.spot.replay import ReplaySettings
from research.spot.traces import SpotTrace


class OptimumError(RuntimeError):
    """No plan was found within the time limit, or none exists."""


@dataclass(frozen=True)
class Optimum:
    """The result of the solver. Costs are over that of N_tar on-demand replicas during the whole window."""

    cost: float
    """The cost of the best plan that was found."""
    bound: float
    """A lower bound of the cost of all plans of the model."""
    availability: float
    """The share of the time in which the plan has at least N_tar replicas ready."""

    @property
    def gap(self) -> float:
        """The relative gap between cost and bound."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


def solve_optimum(
    trace: SpotTrace,
    settings: ReplaySettings,
    first_tick: int,
    ticks: int,
    availability: float,
    *,
    by_zone: bool = True,
    step_s: float | None = None,
    gap: float = 0.01,
    limit_s: float = 60.0,
) -> Optimum:
    """Solves equations 1 to 5 for a window with SCIP, with one thread. Ctrl-C does not stop the solver.

    The variables are the launched and the ready replicas, S(z, t), S_r(z, t), O(t) and O_r(t), and M(t), which says
    that N_tar replicas are ready. The printed equations are read as follows:

    - Equation 1: k is the price of an on-demand replica over that of a spot replica. Launched replicas are paid, so
      cold starts are billed.
    - Equation 4, garbled in print: the replicas that are ready at t have been launched during the whole cold start
      before t, so S_r(t) <= S(t') for all t' in [t - d, t]. Readiness is for each zone, S_r(z, t) <= S(z, t'), because
      a launch in one zone does not make a replica of another zone ready. `by_zone` False is the literal, aggregate
      reading: its optimum is lower, because replicas can change their zone without a cold start.
    - Equation 5: M(t) = 1 requires S_r(t) + O_r(t) >= N_tar. The other direction is not needed, because a plan gains
      nothing from a smaller M(t).

    The times at which the plan may change are the times at which a zone's capacity changes, and one cold start before
    and after them; with `step_s` also all multiples of `step_s`. The result is the optimum of the plans that change at
    these times only. Fewer times make the model small: a window of a day is solved in about a tenth of a second.

    Args:
        trace: the trace; all spot replicas have the price 1.
        settings: N_tar, d and k.
        first_tick: the first tick of the window.
        ticks: the number of ticks of the window.
        availability: Avail_Tar, from 0 to 1. Nothing is ready during the first cold start, so 1 cannot be reached.
        by_zone: whether equation 4 holds for each zone.
        step_s: the distance in seconds of further times at which the plan may change; None: there are none.
        gap: the relative gap at which the solver stops.
        limit_s: the time limit in seconds. A solver that reaches the limit returns its best plan; see `Optimum.gap`.

    Raises:
        OptimumError: no plan was found.
        ValueError: the trace does not contain these ticks.
    """
    if not (first_tick >= 0 and ticks > 0 and first_tick + ticks <= trace.ticks):
        raise ValueError(f"ticks {first_tick} to {first_tick + ticks}: the trace has {trace.ticks} ticks")
    target, cold_s = settings.target, settings.cold_start_s
    counts = [[min(target, one) for one in zone[first_tick : first_tick + ticks]] for zone in trace.capacity]
    edges = _edges(counts, trace.gap_s, cold_s, step_s)
    lengths = [end - start for start, end in pairwise(edges)]
    at = range(len(lengths))
    model = pywraplp.Solver.CreateSolver("SCIP")
    if not model.SetSolverSpecificParametersAsString("misc/catchctrlc = FALSE"):
        raise RuntimeError("SCIP does not have the parameter misc/catchctrlc")

    def zone_capacity(zone: list[int], t: int) -> int:
        return zone[int(edges[t] // trace.gap_s)]

    def variables(most: list[int]) -> list[pywraplp.Variable]:
        return [model.IntVar(0, one, "") for one in most]

    warm = [edges[t] >= cold_s for t in at]
    launched = [variables([zone_capacity(zone, t) for t in at]) for zone in counts]
    fallback = variables([target for _ in at])
    ready_fallback = variables([target * warm[t] for t in at])
    # The parts of the window that a replica which is ready in part t has been launched in.
    needed = [[q for q in range(t + 1) if edges[q + 1] > edges[t] - cold_s] for t in at]
    ready: list[list[pywraplp.Variable]] = []
    totals = [sum(zone[t] for zone in launched) for t in at]
    if by_zone:
        ready = [variables([zone_capacity(zone, t) * warm[t] for t in at]) for zone in counts]
        for zone, of in zip(launched, ready, strict=True):
            for t in at:
                for q in needed[t]:
                    model.Add(of[t] <= zone[q])
    else:
        ready = [variables([target * warm[t] for t in at])]
        for t in at:
            for q in needed[t]:
                model.Add(ready[0][t] <= totals[q])
    met = [model.BoolVar("") for _ in at]
    for t in at:
        for q in needed[t]:
            model.Add(ready_fallback[t] <= fallback[q])
        model.Add(sum(of[t] for of in ready) + ready_fallback[t] >= target * met[t])
    whole_s = sum(lengths)
    model.Add(sum(length * one for length, one in zip(lengths, met, strict=True)) >= availability * whole_s - 1e-6)
    price = settings.od_price_ratio
    model.Minimize(sum(lengths[t] * (totals[t] + price * fallback[t]) for t in at))
    model.SetTimeLimit(round(1000 * limit_s))
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, gap)
    status = model.Solve(parameters)
    if status not in (model.OPTIMAL, model.FEASIBLE):
        raise OptimumError(
            f"no plan with an availability of {availability:g} was found within {limit_s:g} s of computing, for"
            f" replicas that need {cold_s:g} s to start"
        )
    most = price * target * whole_s
    reached_s = sum(length for length, one in zip(lengths, met, strict=True) if one.solution_value() > 0.5)
    return Optimum(model.Objective().Value() / most, model.Objective().BestBound() / most, reached_s / whole_s)


def _edges(counts: list[list[int]], gap_s: float, cold_s: float, step_s: float | None) -> list[float]:
    ticks = len(counts[0])
    changes = [0.0, *(k * gap_s for k in range(1, ticks) if any(zone[k] != zone[k - 1] for zone in counts))]
    whole_s = ticks * gap_s
    times = {at_s + shift for at_s in changes for shift in (-cold_s, 0.0, cold_s)} | {whole_s}
    if step_s is not None:
        times |= {k * step_s for k in range(int(whole_s / step_s) + 1)}
    # Changes of capacity are edges themselves, so the capacity is constant between two edges.
    return sorted(at_s for at_s in times if 0 <= at_s <= whole_s)
