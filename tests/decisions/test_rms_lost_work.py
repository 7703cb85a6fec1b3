"""The work that victims lose, by which a region compares its options: examples with known results."""

from dataclasses import replace

import pytest

from domain.scheduling import (
    RegionSnapshot,
    RunningWorkload,
)
from rms.bid import bid
from rms.region import RegionColumns

from .fleets import gpu_job, machine, plan_of, region, request, running


def _silent(*holdings: tuple[str, int]) -> RunningWorkload:
    return running("silent", *holdings, checkpoint_at_s=None)


def _usual() -> RegionSnapshot:
    """Returns checkpoints 100, 300 and 800 s old in `c1`, 10 and 20 s old in `c2`, and none in `c3`."""
    machines = [machine(f"{cluster}-m", 64, cluster=cluster) for cluster in ("c1", "c2", "c3")]
    ages = {"a": ("c1-m", 100.0), "b": ("c1-m", 300.0), "c": ("c1-m", 800.0), "d": ("c2-m", 10.0), "e": ("c2-m", 20.0)}
    return region(machines, [running(id_, (on, 1), checkpoint_at_s=1000.0 - age) for id_, (on, age) in ages.items()])


@pytest.mark.parametrize(
    ("victim", "lost_gpu_ms"),
    [
        (running("w", ("c1-m", 4), checkpoint_at_s=990.0), 40_000),
        (running("w", ("c1-m", 3), checkpoint_at_s=999.9999), 0),
        (running("w", ("c1-m", 4), checkpoint_at_s=1001.0), 0),
        (_silent(("c1-m", 4)), 4 * 300_000),
        (_silent(("c2-m", 2)), 2 * 15_000),
        (_silent(("c1-m", 1), ("c2-m", 2)), 3 * 15_000),
        (_silent(("c2-m", 2), ("c1-m", 2)), 4 * 300_000),
        (_silent(("c3-m", 2)), 2 * 100_000),
        (_silent(("gone", 2)), 2 * 100_000),
    ],
    ids=[
        "since its checkpoint",
        "rounded to milliseconds",
        "a clock ahead",
        "its cluster's median",
        "the mean of the middle two",
        "the cluster with most of it",
        "the first of two equal ones",
        "the region's where its cluster is silent",
        "the region's where its cluster is unknown",
    ],
)
def test_lost_work(victim: RunningWorkload, lost_gpu_ms: int) -> None:
    """Lost work is the GPU seconds since the last checkpoint; without one, the age is its cluster's median."""
    usual = _usual()
    there = RegionColumns.of(replace(usual, running=(*usual.running, victim)))
    there.compute_lost_work()
    assert there.holders.lost_gpu_ms[len(usual.running)] == lost_gpu_ms


def test_nothing_is_lost_where_nobody_reports() -> None:
    """Without any checkpoint in the region, lost work is 0."""
    silent = _silent(("m", 8))
    there = RegionColumns.of(region([machine("m")], [silent]))
    there.compute_lost_work()
    assert there.holders.lost_gpu_ms[0] == 0


def test_silence_does_not_pay() -> None:
    """A workload without checkpoints is evicted before one whose lost work is known to be above the median."""
    machines = [machine(f"m{n}", used=8, cluster=f"c{n}") for n in (1, 2)]
    machines.append(machine("m3", used=8, cluster="c2", gpu_type="h100"))
    workloads = [
        running("honest", ("m1", 8), checkpoint_at_s=0.0),
        _silent(("m2", 8)),
        running("other", ("m3", 8), checkpoint_at_s=900.0),
    ]
    assert plan_of(bid(region(machines, workloads), request(gpu_job(1, 8)))).victims == ("silent",)
