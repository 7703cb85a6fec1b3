"""The field `tasks` of a job: a number of tasks, or the fewest and the most tasks of an elastic job."""

from typing import Any

from api.documents.forms import Field, cases, integer, section
from api.documents.position import At
from api.documents.topology_rules import MAX_TASKS
from domain.topology import ANYWHERE

_IN_ORDER = "max is at least min"
ALONE = "Only a workload with one job and without array can be elastic"
NO_SLICES = "An elastic job has no slices in its topology"
RULES = ALONE, NO_SLICES


def check_elastic(at: At, values: dict[str, Any]) -> dict[str, Any]:
    """Adds an error for each rule of `RULES` that the workload does not meet, and returns the values."""
    jobs = values.get("jobs", [])
    for number, job in enumerate(jobs):
        most = job.get("most_tasks")
        if most is None:
            continue
        own = at.get("jobs").child(number, at.get("jobs").value[number])
        fixed = f"give one number, such as {most}"
        if len(jobs) > 1:
            own.get("tasks").wrong(
                f"min and max are only possible with one job, not with {len(jobs)}: {fixed}", rule=ALONE
            )
        if values.get("array") is not None:
            own.get("tasks").wrong(f"min and max are not possible with array: {fixed}", rule=ALONE)
        if job.get("topology", ANYWHERE).slice_tasks > 1:
            own.get("topology", "slice").wrong("not possible with min and max in tasks: leave it out", rule=NO_SLICES)
    return values


def _in_order(at: At, values: dict[str, Any]) -> dict[str, Any]:
    least, most = values.get("tasks"), values.get("most_tasks")
    if least is not None and most is not None and most < least:
        at.get("max").wrong(f"must be at least min, which is {least}, it is {most}", rule=_IN_ORDER)
    return values


def _range(values: dict[str, Any]) -> dict[str, Any]:
    found = {name: tasks for name, tasks in values.items() if tasks is not None}
    if found.get("most_tasks") == found.get("tasks"):
        found.pop("most_tasks", None)
    return found


_COUNT = integer(1, MAX_TASKS)
_RANGE = section({
    "min": Field(_COUNT, "The fewest tasks with which it runs", "tasks", missing="give the fewest tasks"),
    "max": Field(_COUNT, f"The most tasks. {_IN_ORDER}", "most_tasks", missing="give the most tasks"),
}, "An elastic job: each attempt has as many tasks as there is room for").checked(_in_order, _IN_ORDER)  # fmt: skip
TASKS = cases(
    {(int, float): _COUNT.to(lambda tasks: {"tasks": tasks}), dict: _RANGE.to(_range)},
    f"must be an integer from 1 to {MAX_TASKS}, or the fewest and the most tasks as in {{{{min: 2, max: 16}}}}, it is "
    "{}",
)
"""The form of the field. The value has the names `tasks` and, if the job is elastic, `most_tasks`."""
