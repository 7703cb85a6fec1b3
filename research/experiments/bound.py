"""Computes an upper bound on the work of any scheduler, from a fluid relaxation (a maximum flow, by OR-Tools).

In the relaxation, workloads start at once, on any machines of their GPU type, at any rate up to all their GPUs, and can
be paused and resumed at no cost. The work of a set of levels within a time is then the value of a maximum flow from
workloads through time buckets to the GPUs. A workload supplies at most its work, and to each bucket at most its GPUs
times its presence in the bucket. A bucket takes at most the time of all GPUs of the type. OR-Tools solves the maximum
flow exactly in whole GPU-seconds.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortools.graph.python.max_flow import SimpleMaxFlow

from simulation.hardware import supply
from simulation.run import Scenario

BUCKET_S = 900.0


@dataclass(frozen=True)
class Fluid:
    """A workload as the upper bound sees it: it may use any number of its GPUs at any time after it arrives."""

    level: int
    arrives_s: float
    duration_s: float
    gpus: int
    gpu_type: str


def most_gpu_h(
    workloads: Iterable[Fluid], slots: Mapping[str, int], until_s: float, levels: Iterable[int]
) -> dict[int, float]:
    """Returns, for some levels, the upper bound on the GPU hours of the level and all higher ones until `until_s`.

    GPU types do not compete, so each is a separate flow.
    """
    by_type: dict[str, list[Fluid]] = defaultdict(list)
    for workload in workloads:
        if workload.gpus and workload.arrives_s < until_s:
            by_type[workload.gpu_type].append(workload)
    return {
        level: sum(
            _flow([w for w in ws if w.level <= level], slots[gpu_type], until_s) for gpu_type, ws in by_type.items()
        )
        / 3600
        for level in levels
    }


def _flow(workloads: Sequence[Fluid], slots: int, until_s: float) -> int:
    """Returns the maximum flow in GPU-seconds. Capacities are rounded up, so it stays an upper bound."""
    if not workloads:
        return 0
    flow = SimpleMaxFlow()
    buckets = int(-(-until_s // BUCKET_S))
    source, sink = 0, 1
    for bucket in range(buckets):
        span_s = min(BUCKET_S, until_s - bucket * BUCKET_S)
        flow.add_arc_with_capacity(2 + bucket, sink, int(-(-slots * span_s // 1)))
    for number, w in enumerate(workloads):
        node = 2 + buckets + number
        flow.add_arc_with_capacity(source, node, int(-(-w.gpus * w.duration_s // 1)))
        for bucket in range(int(w.arrives_s // BUCKET_S), buckets):
            span_s = min((bucket + 1) * BUCKET_S, until_s) - max(bucket * BUCKET_S, w.arrives_s)
            flow.add_arc_with_capacity(node, 2 + bucket, int(-(-w.gpus * span_s // 1)))
    status = flow.solve(source, sink)
    if status != flow.OPTIMAL:
        raise RuntimeError(f"maximum flow of {len(workloads)} workloads: status {status}, must be OPTIMAL")
    return int(flow.optimal_flow())


def bound(facts: Mapping[str, Any], scene: Scenario, levels: Iterable[int]) -> dict[int, float]:
    """Returns the upper bounds of `most_gpu_h` for a cell, over its whole time."""
    fluids = [
        Fluid(w.level, w.arrives_s, w.duration_s, w.gpus, w.jobs[0].gpu_types[0]) for w in scene.workloads if w.gpus
    ]
    return most_gpu_h(fluids, supply(scene.machines), facts["until_s"] - facts["from_s"], levels)
