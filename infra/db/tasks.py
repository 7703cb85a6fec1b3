"""Which GPU slots the tasks of an attempt have: it follows from the attempt's plan and its allocations."""

from collections.abc import Iterable

from domain.slots import TaskSlots, slots_of_tasks
from domain.spec import WorkloadSpec
from infra.db.models import Allocation, Attempt, Workload


def tasks_of(workload: Workload, attempt: Attempt, allocations: Iterable[Allocation]) -> list[TaskSlots]:
    """The tasks of one attempt, which has these allocations, in the order of jobs and of tasks in them."""
    requests = WorkloadSpec.model_validate(workload.spec).requests()
    return list(slots_of_tasks(requests, attempt.plan["jobs"], {a.machine: a.slots | a.awaited for a in allocations}))
