"""The row of a trace, and the validation of values that all readers share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import TypeVar

from domain.units import parse_size_bytes
from research.traces.errors import TraceError

T = TypeVar("T")
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A past workload: one job of identical tasks. A value that is None is not in the trace, and is drawn at random."""

    workload_id: str
    submit_s: float
    """Submission time, in seconds on the trace's own clock."""
    tenant: str
    priority: int | None
    duration_s: float
    """Seconds of work, without waiting and provisioning."""
    tasks: int
    gpus_per_task: int
    gpu_types: tuple[str, ...] | None
    """Most preferred first."""
    cpus_milli_per_task: int | None
    memory_bytes_per_task: int | None
    tables: tuple[str, ...] | None
    """The tables that the workload reads; (): none."""
    line: int = 0
    """Line in the file, counted from 1."""
    user: str | None = None
    """The person who submitted it."""
    max_runtime_s: float | None = None
    """The limit of its runtime that its document had."""
    recurring: str | None = None
    """The name that the runs of a recurring workload share."""
    min_tasks: int | None = None
    """Of an elastic job: its fewest tasks; `duration_s` is the time with `tasks`."""
    max_tasks: int | None = None

    @property
    def gpus(self) -> int:
        """GPU slots of the whole gang."""
        return self.tasks * self.gpus_per_task


@dataclass(frozen=True)
class BadRow:
    """An invalid value of a row, and the rule that it breaks."""

    line: int
    column: str
    value: str
    right: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.column}: {self.value!r}: {self.right}"


@dataclass
class Trace:
    """The valid rows of a trace, sorted by (submit_s, workload_id), and its bad rows."""

    rows: list[TraceRow] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)


class InvalidCell(Exception):
    """A value of a row is invalid."""

    def __init__(self, column: str, value: object, right: str) -> None:
        super().__init__(column)
        self.column, self.value, self.right = column, value, right


Cells = Mapping[str, object]


def collect(lines: Iterable[tuple[int, Cells]], read: Callable[[int, Cells], TraceRow]) -> Trace:
    """Reads each (line number, cells). A row with an invalid value, or with the id of an earlier row, is a bad row."""
    trace = Trace()
    seen: dict[str, int] = {}
    for number, cells in lines:
        try:
            row = read(number, cells)
            if row.workload_id in seen:
                before = seen[row.workload_id]
                raise InvalidCell("workload_id", row.workload_id, f"must be unique, but line {before} has the same id")
        except InvalidCell as wrong:
            trace.bad.append(BadRow(number, wrong.column, str(wrong.value), wrong.right))
            continue
        seen[row.workload_id] = number
        trace.rows.append(row)
    trace.rows.sort(key=lambda row: (row.submit_s, row.workload_id))
    return trace


def refuse_bad(path: str, bad: list[BadRow]) -> None:
    """Raises an error if there are bad rows.

    Raises:
        TraceError: there are bad rows; the message lists the first ten.
    """
    if bad:
        shown = "".join(f"\n  {row}" for row in bad[:_SHOWN])
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise TraceError(f"trace {path}: {len(bad)} bad rows (`--bad-rows skip` ignores them):{shown}{more}")


# ------------------------------------------------------------------------------------------------------------- values


def text(cells: Cells, column: str) -> str:
    """Returns a text that is not empty."""
    value = cells.get(column)
    if value is None or not str(value).strip():
        raise InvalidCell(column, "" if value is None else value, "must not be empty")
    return str(value).strip()


def number(cells: Cells, column: str, least: float = 0.0) -> float:
    """Returns a finite number of at least `least`."""
    right = f"must be a number of at least {least:g}"
    try:
        value = float(text(cells, column))
    except ValueError:
        raise InvalidCell(column, cells[column], right) from None
    if not isfinite(value) or value < least:
        raise InvalidCell(column, cells[column], right)
    return value


def whole(cells: Cells, column: str, least: int = 0, most: int = 1 << 40) -> int:
    """Returns an integer from `least` to `most`; `2.0` is accepted."""
    value = number(cells, column, least)
    if value != int(value) or value > most:
        raise InvalidCell(column, cells[column], f"must be a whole number from {least} to {most}")
    return int(value)


def maybe(read: Callable[[Cells, str], T], cells: Cells, column: str) -> T | None:
    """Returns the value that `read` parses, or None if the cell is empty or missing."""
    value = cells.get(column)
    return None if value is None or not str(value).strip() else read(cells, column)


def names(cells: Cells, column: str) -> tuple[str, ...]:
    """Returns the names of a list separated by `|`; `-` is the empty list."""
    parts = tuple(part.strip() for part in text(cells, column).split("|"))
    if parts == ("-",):
        return ()
    if not all(parts) or len(set(parts)) != len(parts):
        raise InvalidCell(column, cells[column], "must be different names separated by |")
    return parts


def size_bytes(cells: Cells, column: str) -> int:
    """Returns the bytes of a number, or of a size such as 16GiB."""
    value = text(cells, column)
    try:
        return parse_size_bytes(value.removesuffix(".0"))
    except ValueError as error:
        raise InvalidCell(column, value, str(error)) from None


def level(cells: Cells, column: str) -> int:
    """Returns a priority level, from 1 to 7."""
    return whole(cells, column, 1, 7)


def tasks_of(gpus: int, per_machine: int) -> tuple[int, int]:
    """Returns (tasks, GPUs per task) for a gang of which only the number of GPUs is known.

    A gang that fits on one machine is one task. A larger gang has as few tasks of equal size as possible; the size is
    rounded up if it does not divide evenly. Example: 12 GPUs on machines of 8 are 2 tasks of 6.
    """
    tasks = max(1, ceil(gpus / per_machine))
    return tasks, ceil(gpus / tasks)
