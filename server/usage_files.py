"""Reads runs of jobs from CSV or Parquet files; errors name the row. docs/data.md describes the columns."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from domain.ids import NAME_RULE, READ_RULE, is_name, is_read
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from infra.errors import MizzenError

NEEDED = ("run", "job", "kind", "tables", "ended_at")
OPTIONAL = ("source", "app", "gpu_type", "gpu_hours", "cpu_hours", "priority")
KINDS = ("ml", "spark", "presto")
OWN_SOURCE = "mizzen"
_LONGEST = 256
_SHOWN = 60


class UsageFileError(MizzenError):
    """The usage file cannot be read at all."""


class _Wrong(ValueError):
    """An invalid cell. The message contains the column, the value, and what would be valid."""

    def __init__(self, column: str, value: object, message: str) -> None:
        super().__init__(f"{column}: {repr(value)[:_SHOWN]}: {message}")


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A row of the file: a run in the form of `POST /v1/usage`, or an error."""

    number: int
    """Line number in a CSV file, where the header is line 1; row number in a Parquet file, from 1."""
    run: dict[str, Any] | None
    wrong: str | None = None


def read_usage(path: Path) -> Iterator[UsageRow]:
    """Yields all rows of a file in order, valid and invalid ones. Files ending in `.parquet` or `.pq` are Parquet.

    Raises:
        UsageFileError: the file cannot be read, or a column is missing or unknown.
    """
    try:
        header, cells = _parquet(path) if path.suffix in (".parquet", ".pq") else _csv(path)
    except (OSError, UnicodeDecodeError, csv.Error, pyarrow.ArrowException) as error:
        raise UsageFileError(f"{path}: {error}") from None
    for name in NEEDED:
        if name not in header:
            raise UsageFileError(f"{path}: column {name}: missing; required columns are {', '.join(NEEDED)}")
    for name in header:
        if name not in (*NEEDED, *OPTIONAL):
            raise UsageFileError(f"{path}: column {name!r}: unknown; the columns are {', '.join((*NEEDED, *OPTIONAL))}")
    return _rows(cells)


def _rows(cells: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[UsageRow]:
    seen: dict[tuple[str, str], int] = {}
    for number, row in cells:
        try:
            run = _run(row)
            first = seen.setdefault((run["source"], run["run"]), number)
            if first != number:
                raise _Wrong("run", run["run"], f"is also in row {first}: run ids must be unique")
            yield UsageRow(number, run)
        except _Wrong as error:
            yield UsageRow(number, None, str(error))


def _run(row: Mapping[str, Any]) -> dict[str, Any]:
    if None in row:  # The `csv` module stores cells beyond the header under None.
        raise _Wrong("the end", row[None], "the row has more cells than the header")  # type: ignore[index]
    kind = _text(row, "kind")
    if kind not in KINDS:
        raise _Wrong("kind", kind, f"must be {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    source = _optional(row, "source", _name) or kind
    if source == OWN_SOURCE:
        raise _Wrong("source", source, "must be another name; mizzen records its own workloads itself")
    run = {
        "source": source,
        "run": _text(row, "run"),
        "job": _text(row, "job"),
        "kind": kind,
        "app": _optional(row, "app", _name),
        "tables": _tables(row),
        "gpu_type": _optional(row, "gpu_type", _name),
        "gpu_hours": _optional(row, "gpu_hours", _hours) or 0.0,
        "cpu_hours": _optional(row, "cpu_hours", _hours) or 0.0,
        "priority": _optional(row, "priority", _priority) or LOWEST_LEVEL,
        "ended_at": _time(row),
    }
    if run["gpu_hours"] and run["gpu_type"] is None:
        raise _Wrong("gpu_hours", row["gpu_hours"], "must be 0 or empty if gpu_type is empty")
    return run


def _optional(row: Mapping[str, Any], column: str, read: Callable[[Mapping[str, Any], str], Any]) -> Any:
    return None if row.get(column) in (None, "") else read(row, column)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    text = value.strip() if isinstance(value, str) else value
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST or not text.isprintable():
        raise _Wrong(column, value, f"must be a string of 1 to {_LONGEST} characters on one line")
    return text


def _name(row: Mapping[str, Any], column: str) -> str:
    text = _text(row, column)
    if not is_name(text):
        raise _Wrong(column, text, f"must be {NAME_RULE}")
    return text


def _tables(row: Mapping[str, Any]) -> list[str]:
    value = row.get("tables")
    names = value.split("|") if isinstance(value, str) and value else value or []
    if not isinstance(names, list):
        raise _Wrong("tables", value, "must be names separated by |, or a list")
    for name in names:
        if not isinstance(name, str) or not is_read(name):
            raise _Wrong("tables", name, f"must be {READ_RULE}")
    if len(set(names)) < len(names):
        raise _Wrong("tables", value, "must name each table and partition once")
    return names


def _number(row: Mapping[str, Any], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError):
        return math.nan


def _hours(row: Mapping[str, Any], column: str) -> float:
    hours = _number(row, column)
    if not 0 <= hours < math.inf:
        raise _Wrong(column, row[column], "must be a number of hours from 0")
    return hours


def _priority(row: Mapping[str, Any], column: str) -> int:
    level = _number(row, column)
    if level not in range(HIGHEST_LEVEL, LOWEST_LEVEL + 1):
        raise _Wrong(column, row[column], f"must be a level from {HIGHEST_LEVEL} (the highest) to {LOWEST_LEVEL}")
    return int(level)


def _time(row: Mapping[str, Any]) -> str:
    value = row.get("ended_at")
    try:
        at = datetime.fromisoformat(value.strip()) if isinstance(value, str) else value
    except ValueError:
        at = None
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise _Wrong("ended_at", value, "must be a time with its zone, such as 2026-11-22T03:00:00Z")
    return at.astimezone(UTC).isoformat()


def _csv(path: Path) -> tuple[list[str], Iterator[tuple[int, Mapping[str, Any]]]]:
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
    header = [str(name).strip() for name in reader.fieldnames or []]
    reader.fieldnames = header
    return header, ((reader.line_num, row) for row in reader)


def _parquet(path: Path) -> tuple[list[str], Iterator[tuple[int, Mapping[str, Any]]]]:
    table = pyarrow.parquet.read_table(path)
    rows = (row for batch in table.to_batches() for row in batch.to_pylist())
    return table.column_names, enumerate(rows, start=1)
