"""Which GPU slots the tasks of an attempt have: it follows from the attempt's plan and its allocations."""

from collections.abc import Iterable

from domain.slots import TaskSlots, slots_of_tasks
from domain.spec import WorkloadSpec
from infra.db.models import Allocation, Attempt


def tasks_of(spec: WorkloadSpec, attempt: Attempt, allocations: Iterable[Allocation]) -> list[TaskSlots]:
    """The tasks of one attempt, which has these allocations, in the order of jobs and of tasks in them."""
    return list(
        slots_of_tasks(spec.requests(), attempt.plan["jobs"], {a.machine: a.slots | a.awaited for a in allocations})
    )
