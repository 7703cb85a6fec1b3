"""Generates regions of MAST's largest size, and workloads to place in them, from a seed.

- The region (section 4.3.1): 20 dynamic clusters, each with 125 machines of 8 GPUs (96 cores, 1 TiB; racks of 16) and
  3,200 without GPUs (64 cores, 256 GiB; racks of 40): 66,500 machines, 64,000 of them without GPUs, and 20,000 GPUs.
- `free_region`: 2% of the GPUs are free; the i-th cluster's share is in proportion to 1 / i (Zipf). Three in four of a
  cluster's free GPUs are on machines that are wholly free, the rest are 1 to 7 per machine; the machines are random. Of
  the machines without GPUs 13% are idle (MAST allocates 87%, section 5.2), evenly over clusters; the others have 0, 2
  or 8 cores and 16 GiB free.
- `full_region`: nothing is free. In each cluster, 250 running workloads hold everything: GPU machines in halves, other
  machines as a whole, with exponentially distributed shares. Their ranks are 3 to 7 by MAST's shares (section 5.1), and
  8 for one in five. They started within the last 66 hours, half of them have reported a checkpoint since, and all may
  be evicted.
- Workloads (section 5.1): a third each have 16, 64 and 128 GPUs, in tasks of 8 GPUs (8 cores and 32 GiB each), in
  random order. They also have tasks of 60 cores and 200 GiB without GPUs, one per machine, for a total of 72, 180 and
  205 machines.
"""

from collections.abc import Iterator

import numpy as np

from domain.scheduling import Holding, JobRequest, MachineState, PlacementRequest, RegionSnapshot, RunningWorkload

NOW_S = 1_000_000.0
CLUSTERS, GPU_MACHINES, CPU_MACHINES, GPUS = 20, 125, 3200, 8
MACHINES = CLUSTERS * (GPU_MACHINES + CPU_MACHINES)
RUNNING = 250
"""Running workloads per cluster of a full region."""
SIZES = ((16, 72), (64, 180), (128, 205))
"""(GPUs, total machines) of the workload sizes."""
_GPU_CORES, _CPU_CORES = 96_000, 64_000
_GIB = 1 << 30
_GPU_BYTES, _CPU_BYTES = 1024 * _GIB, 256 * _GIB
_RANK_SHARES = np.array((16, 54, 0.2, 0.5, 6.3)) / 77 * 0.8


def machine(cluster: str, number: int, gpu: bool, gpus: int = 0, cpus: int = 0, memory: int = 0) -> MachineState:
    """Returns a machine of the region with the given free amounts."""
    if gpu:
        id_, rack = f"{cluster}/g{number:04}", f"r{number // 16:03}"
        return MachineState(id_, cluster, rack, "a100", GPUS, gpus, cpus, memory, _GPU_CORES, _GPU_BYTES)
    id_, rack = f"{cluster}/p{number:04}", f"s{number // 40:03}"
    return MachineState(id_, cluster, rack, None, 0, 0, cpus, memory, _CPU_CORES, _CPU_BYTES)


def free_region(seed: int = 1) -> RegionSnapshot:
    """Returns a region with 2% of the GPUs free, and no running workloads to evict."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, CLUSTERS + 1)
    free = np.floor(0.02 * CLUSTERS * GPU_MACHINES * GPUS * weights / weights.sum()).astype(int)
    machines = []
    for c in range(CLUSTERS):
        cluster = f"c{c:02}"
        for i, here in enumerate(_free_gpus(rng, int(free[c])).tolist()):
            cores = _GPU_CORES if here == GPUS else 12_000 * here
            machines.append(machine(cluster, i, True, here, cores, here * 128 * _GIB))
        idle = rng.random(CPU_MACHINES) < 0.13
        free_cores = np.where(idle, _CPU_CORES, rng.choice((0, 2000, 8000), CPU_MACHINES))
        for i in range(CPU_MACHINES):
            memory = _CPU_BYTES if idle[i] else 16 * _GIB
            machines.append(machine(cluster, i, False, 0, int(free_cores[i]), memory))
    return RegionSnapshot("here", NOW_S, tuple(machines), ())


def _free_gpus(rng: np.random.Generator, free: int) -> np.ndarray:
    """Returns the free GPUs of each GPU machine of one cluster."""
    whole = int(0.75 * free) // GPUS
    parts = []
    left = free - whole * GPUS
    while left:
        parts.append(min(left, int(rng.integers(1, GPUS))))
        left -= parts[-1]
    out = np.zeros(GPU_MACHINES, int)
    out[: whole + len(parts)] = [GPUS] * whole + parts
    return rng.permutation(out)


def full_region(seed: int = 1, units: int = 1) -> RegionSnapshot:
    """Returns a region without free capacity, whose workloads may all be evicted; `units`: factor on the clusters."""
    rng = np.random.default_rng(seed)
    machines: list[MachineState] = []
    running: list[RunningWorkload] = []
    for c in range(CLUSTERS * units):
        cluster = f"c{c:03}"
        here = [machine(cluster, i, True) for i in range(GPU_MACHINES)]
        here += [machine(cluster, i, False) for i in range(CPU_MACHINES)]
        machines += here
        running += _holders(rng, cluster, here)
    return RegionSnapshot("here", NOW_S, tuple(machines), tuple(running))


def _holders(rng: np.random.Generator, cluster: str, machines: list[MachineState]) -> Iterator[RunningWorkload]:
    """Yields running workloads that together hold a whole cluster."""
    share = rng.exponential(size=RUNNING)
    share /= share.sum()
    holdings: list[list[Holding]] = [[] for _ in range(RUNNING)]
    halves = np.repeat(np.arange(RUNNING), rng.multinomial(2 * GPU_MACHINES, share))
    for at, m in zip(range(0, 2 * GPU_MACHINES, 2), _shuffled(rng, machines[:GPU_MACHINES]), strict=True):
        owners = set(halves[at : at + 2].tolist())
        for owner in sorted(owners):
            n = len(owners)
            holdings[owner].append(Holding(m.id, m.gpus // n, m.cpus_milli // n, m.memory_bytes // n))
    whole = np.repeat(np.arange(RUNNING), rng.multinomial(CPU_MACHINES, share))
    for owner, m in zip(whole.tolist(), _shuffled(rng, machines[GPU_MACHINES:]), strict=True):
        holdings[owner].append(Holding(m.id, 0, m.cpus_milli, m.memory_bytes))
    rank = rng.choice((3, 4, 5, 6, 7, 8), RUNNING, p=(*_RANK_SHARES / _RANK_SHARES.sum() * 0.8, 0.2))
    started_s = NOW_S - rng.random(RUNNING) * 66 * 3600
    saved = rng.random(RUNNING) < 0.5
    saved_s = NOW_S - rng.random(RUNNING) * np.minimum(600, NOW_S - started_s)
    for k in range(RUNNING):
        checkpoint_s = float(saved_s[k]) if saved[k] else None
        yield RunningWorkload(f"{cluster}-w{k:03}", int(rank[k]), float(started_s[k]), tuple(holdings[k]), checkpoint_s)


def _shuffled(rng: np.random.Generator, machines: list[MachineState]) -> list[MachineState]:
    return [machines[i] for i in rng.permutation(len(machines))]


def requests(workloads: int, rank: int, seed: int = 2) -> list[PlacementRequest]:
    """Returns requests of `workloads` workloads of a rank."""
    rng = np.random.default_rng(seed)
    out = []
    for number, size in enumerate(rng.permutation(np.arange(workloads) % len(SIZES)).tolist()):
        gpus, machines = SIZES[size]
        train = JobRequest("train", gpus // GPUS, GPUS, ("a100",), 8000, 32 * _GIB)
        read = JobRequest("read", machines - gpus // GPUS, 0, (), 60_000, 200 * _GIB)
        out.append(PlacementRequest(f"new-{number:05}", rank, (train, read)))
    return out


def table_to_sum() -> np.ndarray:
    """Returns the (66,500 x 4) array of random 32-bit integers whose sum is the baseline for a bid."""
    return np.random.default_rng(3).integers(0, 100, (MACHINES, 4), np.int32)
