"""The inputs of the benches match their documentation and are the same in every run."""

from collections import Counter

import pytest

from bench import queues, regions
from bench.award import at_once
from bench.memory import column_bytes
from gms.columns import QueueColumns
from rms.region import RegionColumns


def test_a_queue_is_drawn_from_its_seed() -> None:
    """A queue depends only on its seed; tenants follow Zipf's law, and most workloads are within quota."""
    queue = queues.queue(20_000, 50)
    assert queue == queues.queue(20_000, 50)
    assert len(queue.pending) == 20_000 and len(queue.placed) == 400 and len(queue.tenants) == 50
    by_tenant = Counter(w.tenant for w in queue.pending)
    assert by_tenant["t000"] > 1.5 * by_tenant["t001"] > 2 * by_tenant["t009"]
    assert len({w.jobs for w in queue.pending}) > 1000
    assert 0.002 < sum(w.held for w in queue.pending) / 20_000 < 0.02


def test_the_free_region() -> None:
    """The region has 66,500 machines in 20 clusters with 20,000 GPUs, 2% of them free, most in the first cluster."""
    region = regions.free_region()
    assert len(region.machines) == regions.MACHINES == 66_500 and region.running == ()
    assert sum(m.gpus for m in region.machines) == 20_000
    free = Counter[str]()
    for m in region.machines:
        free[m.cluster] += m.free_gpus
        assert m.free_gpus <= m.gpus and m.free_cpus_milli <= m.cpus_milli and m.free_memory_bytes <= m.memory_bytes
    assert 0.019 <= sum(free.values()) / 20_000 <= 0.02
    assert free["c00"] == pytest.approx(2 * free["c01"], abs=2) and min(free.values()) == free["c19"]
    assert region == regions.free_region()


def test_the_full_region() -> None:
    """No slot is free, and per region 5,000 running workloads of ranks 3 to 8 hold exactly all resources."""
    region = regions.full_region(units=2)
    assert len(region.machines) == len({m.id for m in region.machines}) == 2 * regions.MACHINES
    assert len(region.running) == 2 * 5000 and {w.rank for w in region.running} == {3, 4, 5, 6, 7, 8}
    held = Counter[str]()
    for w in region.running:
        for h in w.holdings:
            held[h.machine] += h.cpus_milli
    for m in region.machines:
        assert (m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) == (0, 0, 0)
        assert held[m.id] == m.cpus_milli
    assert sum(w.gpus for w in region.running) == 2 * 20_000


def test_workloads_are_of_three_sizes() -> None:
    """A third each of the workloads has 16, 64 and 128 GPUs, on 72, 180 and 205 machines."""
    sizes = Counter((r.jobs[0].gpus, sum(job.tasks for job in r.jobs)) for r in regions.requests(60, 3))
    assert sizes == {(16, 70 + 2): 20, (64, 180): 20, (128, 205): 20}


def test_bytes_of_columns() -> None:
    """The size is that of the arrays of queue and region: at least 30 bytes per workload and 70 per machine."""
    queue, region = QueueColumns.of(queues.queue(5000, 10)), RegionColumns.of(regions.free_region())
    found = column_bytes(queue, region)
    assert found["queue"] >= queue.pending.nbytes >= 30 * 5000
    assert found["region"] >= 70 * regions.MACHINES


def test_threads_start_together_and_tell_their_errors() -> None:
    """`at_once` returns the time after all threads have ended, and raises the error of a thread in the caller."""
    done: list[int] = []
    assert at_once([lambda k=k: done.append(k) for k in range(3)]) >= 0  # type: ignore[misc]
    assert sorted(done) == [0, 1, 2]

    def broken() -> None:
        raise ValueError("the thread failed")

    with pytest.raises(ValueError, match="the thread failed"):
        at_once([broken, lambda: done.append(3)])
    assert 3 in done
