"""Reads runs of jobs from CSV or Parquet files; errors name the row. docs/data.md describes the columns."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from pydantic import ValidationError

from api.data.usage import RunBody
from domain.ids import is_name
from infra.documents import problem_lines
from infra.errors import MizzenError

NEEDED = ("run", "job", "kind", "tables", "ended_at")
OPTIONAL = ("source", "app", "gpu_type", "gpu_hours", "cpu_hours", "priority")
_NUMBERS = {"gpu_hours", "cpu_hours", "priority"}


class UsageFileError(MizzenError):
    """The usage file cannot be read at all."""


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
                raise ValueError(f"run: {run['run']!r}: is also in row {first}: run ids must be unique")
            yield UsageRow(number, run)
        except ValueError as error:
            yield UsageRow(number, None, str(error))


def _run(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the run in a row. Numbers may be text, tables may be separated by |, and empty cells are left out."""
    if None in row:  # The `csv` module stores cells beyond the header under None.
        raise ValueError(f"the end: {row[None]!r}: the row has more cells than the header")  # type: ignore[index]
    cells = {name: value.strip() if isinstance(value, str) else value for name, value in row.items()}
    given = {name: value for name, value in cells.items() if value not in (None, "")}
    tables = given.get("tables", [])
    given["tables"] = tables.split("|") if isinstance(tables, str) else tables
    for name in _NUMBERS & given.keys():
        given[name] = _number(given[name])
    kind = given.get("kind")
    # If the kind is invalid, this is the only error.
    given.setdefault("source", kind if isinstance(kind, str) and is_name(kind) else "unknown")
    try:
        run = RunBody.model_validate(given)
    except ValidationError as error:
        raise ValueError("; ".join(problem_lines(RunBody, error))) from None
    return {**run.model_dump(), "ended_at": run.ended_at.astimezone(UTC).isoformat()}


def _number(value: Any) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return int(number) if number.is_integer() else number


def _csv(path: Path) -> tuple[list[str], Iterator[tuple[int, Mapping[str, Any]]]]:
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
    header = [str(name).strip() for name in reader.fieldnames or []]
    reader.fieldnames = header
    return header, ((reader.line_num, row) for row in reader)


def _parquet(path: Path) -> tuple[list[str], Iterator[tuple[int, Mapping[str, Any]]]]:
    table = pyarrow.parquet.read_table(path)
    rows = (row for batch in table.to_batches() for row in batch.to_pylist())
    return table.column_names, enumerate(rows, start=1)
