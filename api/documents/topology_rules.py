"""The field `topology` of a job: which of its tasks must be, or should be, in one place."""

from typing import Any

from api.documents.forms import Field, integer, one_of, section
from api.documents.position import At
from domain.spread import SpreadLevel
from domain.topology import ANYWHERE, TopologyRule

MAX_TASKS = 100_000
ONE_LEVEL = "required and preferred are not both given"
SPANNED = "With span_clusters, only zone can be required"
WHOLE_SLICES = "The tasks of a slice divide the tasks of the job"
SMALL_SLICES = "The level of slices is below the required one"
RULES = SPANNED, WHOLE_SLICES, SMALL_SLICES
_LEVELS = tuple(SpreadLevel)


def check_topology(at: At, values: dict[str, Any]) -> dict[str, Any]:
    """Adds an error for each rule of `RULES` that the job does not meet, and returns the values."""
    rule: TopologyRule = values.get("topology", ANYWHERE)
    where, required, tasks = at.get("topology"), rule.required, values.get("tasks", 1)
    if values.get("span_clusters") and required not in (None, SpreadLevel.ZONE):
        message = f"must be zone if span_clusters is true, it is {required}; or leave span_clusters out"
        where.get("required").wrong(message, rule=SPANNED)
    if tasks % rule.slice_tasks:
        message = f"must divide the {tasks} tasks of the job, it is {rule.slice_tasks}"
        where.get("slice", "tasks").wrong(message, rule=WHOLE_SLICES)
    if rule.slice_tasks > 1 and required and _LEVELS.index(rule.slice_level) >= _LEVELS.index(required):
        message = f"must be below {required}, which is required for all tasks, it is {rule.slice_level}"
        where.get("slice", "level").wrong(message, rule=SMALL_SLICES)
    return values


def _one_level(at: At, values: dict[str, Any]) -> dict[str, Any]:
    if "required" in values and "preferred" in values:
        at.get("preferred").wrong("not possible with required: leave one of them out", rule=ONE_LEVEL)
    return values


_LEVEL = one_of(_LEVELS, "machine, rack, cluster or zone").to(SpreadLevel)
_SLICE_LEVEL = one_of((SpreadLevel.MACHINE, SpreadLevel.RACK), "machine or rack").to(SpreadLevel)
_SLICE = section({
    "tasks": Field(integer(1, MAX_TASKS), f"Tasks of one slice. {WHOLE_SLICES}", "slice_tasks",
                   missing="give the number of tasks that stay together"),
    "level": Field(_SLICE_LEVEL, f"What the tasks of a slice share. {SMALL_SLICES}", "slice_level",
                   missing="give machine or rack"),
}, "Groups of tasks that stay together")  # fmt: skip
TOPOLOGY = section({
    "required": Field(_LEVEL, f"What all tasks share: the job waits for a place with room. {SPANNED}"),
    "preferred": Field(_LEVEL, f"What all tasks share, if a place has room without more evictions. {ONE_LEVEL}"),
    "slice": Field(_SLICE, to=""),
}, "Which tasks are on one machine, or in one rack, cluster or zone").checked(_one_level, ONE_LEVEL).to(
    lambda found: TopologyRule(**found)
)  # fmt: skip
