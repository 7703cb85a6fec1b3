"""Plain references of the closed forms in `reclaim/`: direct transcriptions, and numeric optimisation."""

from collections.abc import Callable
from math import exp, inf, log, sqrt


def least(cost: Callable[[float], float], low: float, high: float) -> float:
    """Returns where a function with one minimum is least between two positive numbers: golden section of logarithms."""
    golden = (sqrt(5) - 1) / 2
    a, b = log(low), log(high)
    for _ in range(120):
        c, d = b - golden * (b - a), a + golden * (b - a)
        if cost(exp(c)) <= cost(exp(d)):
            b = d
        else:
            a = c
    return exp((a + b) / 2)


def rate_of_cost(hazard_per_h: float, size_bytes: float, bandwidth_bytes_s: float, interval_s: float) -> float:
    """Equation 3: the share of time that a job is expected to lose."""
    return hazard_per_h / 3600 * interval_s / 2 + size_bytes / (bandwidth_bytes_s * interval_s)


def iterated(weights: list[float], caps: list[float], budget: float) -> list[float]:
    """The iteration of Lemma 2, round by round."""
    found = [0.0] * len(weights)
    active = set(range(len(weights)))
    while active:
        total = sum(weights[i] for i in active)
        share = {i: budget * weights[i] / total for i in active}
        over = {i for i in active if share[i] > caps[i]}
        if not over:
            for i in active:
                found[i] = share[i]
            break
        for i in over:
            found[i] = caps[i]
            budget -= caps[i]
        active -= over
    return found


def best_cost(loads: list[float], caps: list[float], budget: float) -> float:
    """Minimises the sum of sqrt(2 load / b) by exchanges between pairs of jobs, without any closed form.

    `loads` are lambda C. The start is a feasible point. An exchange divides what two jobs have together in the way that
    is best for both. The function is convex and separable, so repeated exchanges reach its minimum.
    """
    n = len(loads)
    share = _start(caps, budget)
    cost = inf
    while True:
        for i in range(n):
            for j in range(i):
                _exchange(loads, caps, share, i, j)
        now = sum(sqrt(2 * load / b) for load, b in zip(loads, share, strict=True))
        if now > cost * (1 - 1e-12):
            return now
        cost = now


def _start(caps: list[float], budget: float) -> list[float]:
    share = [0.0] * len(caps)
    left = budget
    for _ in caps:
        open_ = [i for i in range(len(caps)) if share[i] < caps[i]]
        if not open_ or left <= 0:
            break
        part = left / len(open_)
        for i in open_:
            more = min(part, caps[i] - share[i])
            share[i] += more
            left -= more
    return share


def _exchange(loads: list[float], caps: list[float], share: list[float], i: int, j: int) -> None:
    total = share[i] + share[j]
    # Searched for the job that gets less, so that a tiny share keeps its digits.
    if loads[i] > loads[j]:
        i, j = j, i
    low, high = max(total - caps[j], total * 1e-15), min(caps[i], total * (1 - 1e-15))
    if low >= high:
        return
    best = least(lambda b: sqrt(2 * loads[i] / b) + sqrt(2 * loads[j] / (total - b)), low, high)
    share[i], share[j] = best, total - best
