"""memory: the memory growth of a process from empty to 1,000,000 pending workloads and 84,000 machines.

It is compared with the bytes of the columns. Each round is a new process: it loads all code with a small queue and
region, reads its resident memory (VmRSS), applies the queue (`bench.queues`) and the machines as changes, 10,000
workloads at a time, scans and refreshes once, frees its input, and reads VmRSS again. The absolute values also contain
`in_use`: the growth without the freed memory that the C library keeps.

The columns of the queue are the arrays of `Rows` (times, ids, tenant, requested level, held, gang; the ids are the
workloads' names) and the flat arrays of its gangs; those of the region are the arrays of `Machines` and `Holders`.
Machine names, dictionaries by name and other objects are not columns, so they increase the ratio. The 84,000 machines
are in 20 clusters, each with 1,000 machines of 8 GPUs and 3,200 without GPUs.
"""

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from activities.scheduling.precompile import precompile
from bench import queues, regions
from bench.harness import Bench, Figure, Line, Suite, interleave, medians
from domain.scheduling import MachineState
from gms.columns import QueueChange, QueueColumns
from gms.scan import scan_queue
from infra.memory import give_back_freed_memory
from rms.region import RegionColumns

WORKLOADS, TENANTS = 1_000_000, 500
GPU_MACHINES, CPU_MACHINES = 1000, 3200
CHUNK = 10_000


def resident_bytes() -> int:
    """Returns VmRSS of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmRSS")


def _machines() -> Iterator[MachineState]:
    for c in range(regions.CLUSTERS):
        for i in range(GPU_MACHINES):
            yield regions.machine(f"c{c:02}", i, True, 8, 96_000, 1 << 40)
        for i in range(CPU_MACHINES):
            yield regions.machine(f"c{c:02}", i, False, 0, 64_000, 1 << 38)


def _fill(queue: QueueColumns, region: RegionColumns, workloads: int) -> None:
    rng = np.random.default_rng(1)
    gangs = queues.gangs(rng)
    sample = queues.draw(rng, 10 * TENANTS, TENANTS, gangs)
    queue.set_tenants(queues.tenants(rng, TENANTS, sample, sample))
    for first in range(0, workloads, CHUNK):
        drawn = queues.draw(rng, min(CHUNK, workloads - first), TENANTS, gangs)
        queue.apply([QueueChange(w.submitted_at_s, w.id, w) for w in queues.pending(drawn, first)], [])
    for machine in _machines():
        region.put_machine(machine)
    region.refresh(queues.NOW_S)
    scan_queue(queue, queues.NOW_S, queues.WEIGHTS)


def _bytes(arrays: Iterable[object]) -> int:
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def column_bytes(queue: QueueColumns, region: RegionColumns) -> dict[str, int]:
    """Returns the bytes of the columns of the queue and of the region."""
    of_queue = queue.pending.nbytes + queue.placed.nbytes + _bytes(queue.gangs.demand) + _bytes(queue.holdings.held)
    return {"queue": of_queue, "region": _bytes(region.machines) + _bytes(region.holders)}


def measure(workloads: int) -> Mapping[str, int]:
    """Returns the growth of this process's resident memory, and the bytes of the columns.

    `grown` includes freed memory that the C library keeps, and is used for the figure; `used` excludes it
    (malloc_trim).
    """
    give_back_freed_memory()  # A worker does the same.
    precompile()
    queue, region = QueueColumns(), RegionColumns("here")
    _fill(QueueColumns(), RegionColumns("small"), 1000)
    gc.collect()
    before = resident_bytes()
    _fill(queue, region, workloads)
    gc.collect()
    after = resident_bytes()
    ctypes.CDLL(None).malloc_trim(0)
    return {"grown": after - before, "used": resident_bytes() - before, **column_bytes(queue, region)}


def _in_a_process() -> Mapping[str, float]:
    command = [sys.executable, "-c", f"from bench.memory import main; main({WORKLOADS})"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, start_new_session=True)
    found = json.loads(done.stdout)
    columns = found["queue"] + found["region"]
    return {
        "grown_mb": found["grown"] / 1e6,
        "in_use_mb": found["used"] / 1e6,
        "columns_mb": columns / 1e6,
        "queue_columns_mb": found["queue"] / 1e6,
        "region_columns_mb": found["region"] / 1e6,
    }


def main(workloads: int) -> None:
    """Measures in this process, and prints the result as JSON."""
    print(json.dumps(measure(workloads)))


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields its figure."""
    found = medians(interleave(bench, {"process": _in_a_process}, warm_ups=0))
    sizes = {"pending": WORKLOADS, "machines": regions.CLUSTERS * (GPU_MACHINES + CPU_MACHINES)}
    yield Figure(SUITE.name, SUITE.lines[0], found["grown_mb"] / found["columns_mb"], found, bench.rounds, sizes)


SUITE = Suite("memory", (Line("growth over columns", 2),), run)
