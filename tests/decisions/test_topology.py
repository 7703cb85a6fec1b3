"""Examples of jobs whose tasks must be, or should be, in one place; random ones are in `test_rms_bid.py`."""

from dataclasses import replace

import pytest

from domain.reasons import ReasonCode
from domain.scheduling import JobRequest, MachineState, RegionSnapshot
from domain.spread import SpreadLevel
from domain.topology import TopologyRule
from rms.bid import bid

from .fleets import gpu_job, machine, plan_of, region, request, running

MACHINE, RACK, CLUSTER, ZONE = SpreadLevel


def _racks(*used: tuple[int, ...]) -> list[MachineState]:
    """Returns machines of eight GPUs in racks r0, r1, and so on, with these numbers of used GPUs."""
    return [
        machine(f"m{rack}{number}", used=gpus, rack=f"r{rack}")
        for rack, machines in enumerate(used)
        for number, gpus in enumerate(machines)
    ]


def _job(tasks: int, gpus: int, **rule: object) -> JobRequest:
    return replace(gpu_job(tasks, gpus), topology=TopologyRule(**rule))  # type: ignore[arg-type]


def _places(snapshot: RegionSnapshot, job: JobRequest) -> list[tuple[str, int]]:
    (placed,) = plan_of(bid(snapshot, request(job))).jobs
    return list(placed.machines)


def test_a_required_rack_waits_for_room_in_one_rack() -> None:
    """Two racks with one free machine each do not hold two tasks that must share a rack; the reason says how far."""
    snapshot = region(_racks((0, 8), (0, 8)))
    assert len(_places(snapshot, _job(2, 8))) == 2
    refused = bid(snapshot, request(_job(2, 8, required=RACK)))
    assert refused.plan is None
    reason = next(one for one in refused.reasons if one.code is ReasonCode.NOT_TOGETHER)
    assert (reason.detail["largest"], reason.detail["places"], reason.detail["level"]) == (1, 0, "rack")
    assert "2 tasks of job train must be in one rack" in reason.sentence


def test_victims_make_room_in_one_rack() -> None:
    """The longest running workload is no victim if the rest of its rack cannot be had."""
    workloads = [
        running("a", ("m00", 8), started_at_s=300.0),
        running("b", ("m10", 8), started_at_s=100.0),
        running("c", ("m11", 8), evictable=False),
    ]
    snapshot = region(_racks((8, 0), (8, 8)), workloads)
    assert plan_of(bid(snapshot, request(_job(2, 8)))).victims == ("b",)
    plan = plan_of(bid(snapshot, request(_job(2, 8, required=RACK))))
    assert plan.victims == ("a",)
    assert [name for name, _ in plan.jobs[0].machines] == ["m00", "m01"]


def test_a_preferred_rack_evicts_nobody() -> None:
    """If no rack has room, the tasks are placed in several racks instead of evicting a workload."""
    snapshot = region(_racks((0, 8), (0, 8)), [running("a", ("m01", 8))])
    plan = plan_of(bid(snapshot, request(_job(2, 8, preferred=RACK))))
    assert plan.victims == () and plan.quality.apart == 1


def test_a_preferred_rack_comes_before_the_preferred_type() -> None:
    """A rack of the second GPU type is better than two racks of the first one."""
    others = [machine(f"h{n}", gpu_type="h100", rack="r9") for n in range(2)]
    job = replace(_job(2, 8, preferred=RACK), gpu_types=("a100", "h100"))
    plan = plan_of(bid(region([*_racks((0,), (0,)), *others]), request(job)))
    assert plan.jobs[0].gpu_type == "h100" and plan.quality.apart == 0
    anywhere = replace(job, topology=TopologyRule())
    assert plan_of(bid(region([*_racks((0,), (0,)), *others]), request(anywhere))).jobs[0].gpu_type == "a100"


@pytest.mark.parametrize(("slice_tasks", "expected"), [(1, [2, 6]), (4, [4, 4])])
def test_slices_stay_on_one_machine(slice_tasks: int, expected: list[int]) -> None:
    """Each machine gets whole slices only."""
    placed = _places(region(_racks((3, 2))), _job(8, 1, slice_tasks=slice_tasks, slice_level=MACHINE))
    assert sorted(tasks for _, tasks in placed) == expected


def test_slices_stay_in_one_rack() -> None:
    """Each rack gets whole slices only: three tasks in one rack and three in the other, not four and two."""
    snapshot = region(_racks((0, 0, 0, 0), (0, 0, 0)))
    placed = _places(snapshot, _job(6, 8, slice_tasks=3, slice_level=RACK))
    by_rack = [sum(tasks for name, tasks in placed if name.startswith(f"m{rack}")) for rack in range(2)]
    assert sorted(by_rack) == [3, 3]


def test_a_required_zone_limits_the_clusters_that_tasks_span() -> None:
    """Tasks that may span clusters stay in one zone."""
    machines = [replace(machine(f"m{number}", cluster=f"c{number}"), zone=zone) for number, zone in enumerate("yzz")]
    job = replace(_job(2, 8, required=ZONE), span_clusters=True)
    plan = plan_of(bid(region(machines), request(job)))
    assert [name for name, _ in plan.jobs[0].machines] == ["m1", "m2"]
    three = bid(region(machines), request(replace(job, tasks=3)))
    assert three.plan is None and three.reasons[0].code is ReasonCode.NO_HARDWARE


def test_a_rack_that_no_region_has_is_no_hardware() -> None:
    """A job that no rack could hold even if it were empty is refused for good, with the level in the sentence."""
    refused = bid(region(_racks((0,), (0,))), request(_job(2, 8, required=RACK)))
    assert [one.code for one in refused.reasons] == [ReasonCode.NO_HARDWARE]
    assert "all of them in one rack" in refused.reasons[0].sentence
