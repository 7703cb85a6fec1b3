"""Generates a trace by the workload model of Lublin and Feitelson, adapted to gangs of GPUs.

The model (Journal of Parallel and Distributed Computing 63, 2003, batch jobs) was fitted to four supercomputers:

- *Size*: a workload is serial with probability 0.244. Otherwise the binary logarithm of its size is drawn in two
  stages: uniform between 0.8 and u with probability 0.86, else uniform between u and the logarithm of the largest size,
  where u is 2.5 below that. Adapted: every size is rounded to a power of two (in the model, 58 % are), a processor is a
  GPU, and a gang of more GPUs than a machine has is split into one task for each machine.
- *Runtime*: its natural logarithm is hyper-gamma: gamma(4.2, 0.94) with probability p, else gamma(312, 0.03), where p =
  0.78 - 0.0054 * size, so that large workloads run longer. Adapted: at most two days.
- *Arrival*: gaps are drawn from the model's gamma(10.23, 0.49) of their logarithm, in a time that runs with the model's
  daily cycle: the weight of each half hour, counted from midnight, is that of gamma(8.17, 3.96); the cycle begins at
  05:30, so half hours before it count as those of the day before. The busiest time is 14:00.

Tenants have shares by Zipf's law. The gaps set no load: the experiment copies or thins the trace to its load.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from math import exp, log2
from statistics import NormalDist

from research.traces.rows import TraceRow

TENANTS = 8
LONGEST_S = 2 * 86400.0
_SERIAL, _LOW, _BELOW, _FIRST_STAGE = 0.244, 0.8, 2.5, 0.86
_SHORT, _LONG = (4.2, 0.94), (312.0, 0.03)
_GAP = (10.2303, 0.4871)
_CYCLE = (8.1737, 3.9631)
_HALF_HOURS = 48
_DAY_BEGINS = 11
"""Half hours from midnight to the beginning of the cycle, 05:30."""


def lublin_rows(days: float, seed: int, largest: int = 64, per_machine: int = 8) -> list[TraceRow]:
    """Returns the rows of `days` days, sorted by submission; gangs have at most `largest` GPUs."""
    chance = random.Random(f"lublin {seed}")
    weights = [1 / (rank + 1) for rank in range(TENANTS)]
    rows = []
    for number, submit_s in enumerate(_arrivals(chance, days)):
        gpus = _gpus(chance, largest)
        first = 0.78 - 0.0054 * gpus
        runtime_s = exp(chance.gammavariate(*(_SHORT if chance.random() < first else _LONG)))
        tenant = chance.choices(range(TENANTS), weights)[0]
        tasks = max(1, gpus // per_machine)
        rows.append(
            TraceRow(
                f"synthetic-{number}", submit_s, f"tenant-{tenant}", None, min(LONGEST_S, max(1.0, runtime_s)), tasks,
                gpus // tasks, None, None, None, None, number + 1,
            )
        )  # fmt: skip
    return rows


def _gpus(chance: random.Random, largest: int) -> int:
    if chance.random() < _SERIAL:
        return 1
    most = log2(largest)
    middle = most - _BELOW
    low, high = (_LOW, middle) if chance.random() < _FIRST_STAGE else (middle, most)
    return int(2 ** round(chance.uniform(low, high)))


def _arrivals(chance: random.Random, days: float) -> Iterator[float]:
    """Yields the times of submissions in seconds."""
    weights = _cycle()
    at_s, end_s = 0.0, days * 86400.0
    while True:
        left = exp(chance.gammavariate(*_GAP))
        while True:
            weight = weights[int(at_s // 1800) % _HALF_HOURS]
            slot_s = 1800 - at_s % 1800
            if left <= slot_s * weight:
                break
            left, at_s = left - slot_s * weight, at_s + slot_s
        at_s += left / weight
        if at_s >= end_s:
            return
        yield at_s


def _cycle() -> list[float]:
    """Returns the weight of each half hour of the day, 1 on average.

    Probabilities of the gamma distribution by the normal approximation of Wilson and Hilferty.
    """
    shape, scale = _CYCLE
    normal = NormalDist(1 - 1 / (9 * shape), (1 / (9 * shape)) ** 0.5)
    below = [
        normal.cdf((half / scale / shape) ** (1 / 3)) for half in range(_DAY_BEGINS, _DAY_BEGINS + _HALF_HOURS + 1)
    ]
    of_day = [after - before for before, after in pairwise(below)]
    mean = sum(of_day) / _HALF_HOURS
    return [of_day[(half - _DAY_BEGINS) % _HALF_HOURS] / mean for half in range(_HALF_HOURS)]
