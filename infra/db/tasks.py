"""Derives the GPU slots of an attempt's tasks from the attempt's plan and its allocations."""

from collections.abc import Iterable

from domain.slots import TaskSlots, slots_of_tasks
from domain.spec import WorkloadSpec
from infra.db.models import Allocation, Attempt


def tasks_of(spec: WorkloadSpec, attempt: Attempt, allocations: Iterable[Allocation]) -> list[TaskSlots]:
    """Returns the slots of each task of an attempt with these allocations, sorted by job and task index."""
    return list(
        slots_of_tasks(spec.requests(), attempt.plan["jobs"], {a.machine: a.slots | a.awaited for a in allocations})
    )
