"""What no scheduler can exceed: the work of a fluid relaxation, as a linear program (OR-Tools).

Workloads are fluids: they start at once, on any machines of their GPU type, at any rate up to all their GPUs, and stop
and go on as often as they like at no cost. The work of a set of levels within a time is then the value of a flow from
workloads through buckets of time to the GPUs: each workload gives at most its work, and into each bucket at most its
GPUs times the time that it is there; each bucket takes at most all GPUs of the type. Its linear program is that of a
maximum flow, which OR-Tools' algorithm solves exactly in whole GPU-seconds.

    python -m experiments.bound FOLDER
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortools.graph.python.max_flow import SimpleMaxFlow

from experiments.replay import fitting, scene_of
from simulation.fleet import supply

BUCKET_S = 900.0


@dataclass(frozen=True)
class Fluid:
    """A workload: when it comes, how much it works, on what."""

    level: int
    arrives_s: float
    duration_s: float
    gpus: int
    gpu_type: str


def most_gpu_h(workloads: Iterable[Fluid], slots: Mapping[str, int], until_s: float) -> dict[int, float]:
    """By level, the most GPU hours that this level and those above it can work until `until_s`, together.

    GPU types do not compete, so each is a flow of its own.
    """
    by_type: dict[str, list[Fluid]] = defaultdict(list)
    for workload in workloads:
        if workload.gpus and workload.arrives_s < until_s:
            by_type[workload.gpu_type].append(workload)
    levels = sorted({w.level for ws in by_type.values() for w in ws})
    return {
        level: sum(
            _flow([w for w in ws if w.level <= level], slots[gpu_type], until_s) for gpu_type, ws in by_type.items()
        )
        / 3600
        for level in levels
    }


def _flow(workloads: Sequence[Fluid], slots: int, until_s: float) -> int:
    """GPU-seconds. Capacities are rounded up: the bound stays one."""
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
        raise RuntimeError(f"the flow of {len(workloads)} workloads is not optimal: {status}")
    return int(flow.optimal_flow())


def bound(folder: Path) -> dict[str, float]:
    """Of a case, over its whole time: level to the GPU hours that it and those above it can work at most."""
    facts, scene = scene_of(folder)
    scene = fitting(scene)
    fluids = [
        Fluid(w.level, w.arrives_s, w.duration_s, w.gpus, w.jobs[0].gpu_types[0]) for w in scene.workloads if w.gpus
    ]
    most = most_gpu_h(fluids, supply(scene.machines), facts["until_s"] - facts["from_s"])
    return {str(level): gpu_h for level, gpu_h in most.items()}


if __name__ == "__main__":
    path = Path(sys.argv[1]) / "bound.json"
    path.write_text(json.dumps(bound(path.parent)))
