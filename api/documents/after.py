"""The fields of a document that say when a workload enters the queue: `after`, `not_before` and `if_never`."""

import re
from datetime import UTC, datetime
from typing import Any

from api.documents.forms import TRUTH, Field, Form, cases, duration, list_of, name, one_of, section, text
from api.documents.position import At
from domain.ids import NAME_LENGTH, NAME_PATTERN, PARTITION_PATTERN, PARTITION_RULE
from domain.patterns import matching
from domain.spec import DependencySpec

_MOST = 100
_CONDITIONS = ("succeeded", "ended", "failed", "started")
_ON_WORKLOAD = text(
    "a workload's name or id, or NAME:CONDITION", 2 * NAME_LENGTH,
    rf"{NAME_PATTERN[:-1]}(:({'|'.join(_CONDITIONS)}))?$",
    f"must be the name or id of a workload, which may be followed by a colon and one of {', '.join(_CONDITIONS)}",
)  # fmt: skip
_ON_WHAT = "Either workload, or table and partition, is given"
SAME_INDEX = "same_index"
"""The kind of names of workloads that must be arrays with the indexes of the document's array."""
ON_ARRAY = "same_index needs array, and a workload that is an array with these indexes"
_READY = "The condition of a partition is ready, and that of a workload is not"


def _on_workload(at: At, given: str) -> DependencySpec:
    reference, _, condition = given.partition(":")
    at.name("workload", reference)
    return DependencySpec(workload=reference, condition=condition or _CONDITIONS[0])


def _dependency(at: At, values: dict[str, Any]) -> Any:
    given = {key for key, value in at.value.items() if value is not None}
    is_table = not given.isdisjoint(("table", "partition"))
    if given - {"condition", "same_index"} != ({"table", "partition"} if is_table else {"workload"}):
        return at.wrong("must have either the key workload, or the keys table and partition", rule=_ON_WHAT)
    condition = values.setdefault("condition", "ready" if is_table else _CONDITIONS[0])
    if "condition" in given and is_table != (condition == "ready"):
        fitting = "ready" if is_table else f"one of {', '.join(_CONDITIONS)}"
        return at.get("condition").wrong(f"must be {fitting}", rule=_READY)
    if values.get("same_index"):
        if is_table:
            return at.get("same_index").wrong("only possible with workload", rule=ON_ARRAY)
        at.get("same_index").name(SAME_INDEX, values["workload"])
    return DependencySpec(**values)


def after(table: Form) -> Field:
    """Returns the field `after`. `table` is the form of a table's name."""
    on_table = {
        "table": Field(table),
        "partition": Field(text("a partition's name", 200, PARTITION_PATTERN, f"must be {PARTITION_RULE}")),
    }
    mapping = section({
        "workload": Field(name("workload"), "Name or id of a workload of the same tenant; a name means the newest one"),
        **on_table,
        "condition": Field(one_of((*_CONDITIONS, "ready"), "a condition"), "Default: succeeded; of a partition: ready"),
        "same_index": Field(TRUTH, f"Each element waits for the element with the same index. {ON_ARRAY}"),
    }).checked(_dependency, _ON_WHAT, _READY, ON_ARRAY)  # fmt: skip
    one = cases({str: _ON_WORKLOAD.checked(_on_workload), dict: mapping},
                "must be the name of a workload, or a mapping, it is {}")  # fmt: skip
    says = "What must hold before the workload enters the queue: NAME, NAME:CONDITION or a mapping"
    return Field(list_of(one, "dependencies", _MOST).to(tuple), says)


_INSTANT_PATTERN = (
    "^2[0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$"
)
_EXAMPLE = "2026-11-28T08:00:00+01:00"
_REAL_DAY = "The month has the day"
_DELAY = duration(0, 366 * 86400)


def _not_before(at: At) -> Any:
    if not isinstance(at.value, str) or not re.fullmatch(_INSTANT_PATTERN, at.value):
        as_delay = At(at.path, at.value)
        delay_s = _DELAY.read(as_delay)
        if delay_s is None:
            time = f"or a time before the year 3000 with its zone, such as {_EXAMPLE}"
            return at.wrong(f"{as_delay.problems[0].message}, {time}")
        return {"delay_s": delay_s}
    try:
        return {"not_before": datetime.fromisoformat(at.value).astimezone(UTC)}
    except ValueError as error:
        return at.wrong(f"is no time: {error}", rule=_REAL_DAY)


_TIME_OR_DELAY = {
    "anyOf": [matching(_INSTANT_PATTERN), *_DELAY.schema["anyOf"]],
    "description": f"A time with its zone, such as {_EXAMPLE}, or a duration after the submission. {_REAL_DAY}",
}
NOT_BEFORE = Field(Form(_TIME_OR_DELAY, _not_before), "When the workload enters the queue at the earliest", to="")
IF_NEVER = Field(
    one_of(("end", "keep"), "end or keep"),
    "What happens if one of after can never hold: the workload is cancelled, or stays blocked",
)
