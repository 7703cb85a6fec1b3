"""Computes which resources of each machine a plan uses, and which GPU slots each task gets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from domain.scheduling import JobPlacement, JobRequest

MAX_SLOTS = 62
"""Maximum number of GPU slots of one machine, because a mask is a signed 64-bit integer."""


@dataclass
class Share:
    """The resources of one machine that a plan uses."""

    gpus: int = 0
    cpus_milli: int = 0
    memory_bytes: int = 0


def shares(requests: Iterable[JobRequest], placements: Iterable[JobPlacement]) -> dict[str, Share]:
    """Returns the resources that a plan uses on each machine, by machine id.

    Raises:
        ValueError: the plan places more or fewer tasks than a job has.
    """
    out: dict[str, Share] = {}
    for request, placement in zip(requests, placements, strict=True):
        request.sized(placement.tasks)
        for machine, count in placement.machines:
            share = out.setdefault(machine, Share())
            share.gpus += count * request.gpus_per_task
            share.cpus_milli += count * request.cpus_milli_per_task
            share.memory_bytes += count * request.memory_bytes_per_task
    return out


def plan_body(placements: Iterable[JobPlacement]) -> list[dict[str, Any]]:
    """Returns placements in the form in which an attempt stores them (`plan["jobs"]`)."""
    return [{"job": j.job, "cluster": j.cluster, "gpu_type": j.gpu_type, "machines": j.machines} for j in placements]


@dataclass(frozen=True)
class TaskSlots:
    """A task's GPU slots on its machine."""

    machine: str
    job: str
    task: int
    """Index of the task in the job."""
    slots: tuple[int, ...]


def slots_of_tasks(
    requests: Iterable[JobRequest], jobs: Sequence[Mapping[str, Any]], masks: Mapping[str, int]
) -> Iterator[TaskSlots]:
    """Yields every task of an attempt, by job and index; `jobs` is the result of `plan_body`.

    Tasks are numbered in the plan's order of machines. On each machine, the slots of its mask (held or awaited) are
    assigned in ascending order to the tasks in the order of jobs and indices.
    """
    rest = {machine: bits(mask) for machine, mask in masks.items()}
    for request, job in zip(requests, jobs, strict=True):
        machines = [machine for machine, count in job["machines"] for _ in range(count)]
        for task, machine in enumerate(machines):
            own, rest[machine] = rest[machine][: request.gpus_per_task], rest[machine][request.gpus_per_task :]
            yield TaskSlots(machine, request.name, task, tuple(own))


def tasks_of_jobs(jobs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the number of tasks of each job of an attempt; `jobs` is the result of `plan_body`."""
    return {job["job"]: sum(count for _, count in job["machines"]) for job in jobs}


def machines_of_tasks(jobs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], str]:
    """Returns the machine of each task of an attempt, by job and index; `jobs` is the result of `plan_body`."""
    return {
        (job["job"], task): machine
        for job in jobs
        for task, machine in enumerate(machine for machine, count in job["machines"] for _ in range(count))
    }


def bits(mask: int) -> list[int]:
    """Returns the slot numbers of a bit mask in ascending order."""
    return [slot for slot in range(mask.bit_length()) if mask >> slot & 1]
