"""Reads traces in several formats: `philly:PATH`, `openb:PATH`, `csv:PATH` or `parquet:PATH`.

Without a prefix, the file's name and header determine the format.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import partial
from math import ceil
from pathlib import Path

import pyarrow
import pyarrow.parquet

from research.traces.errors import TraceError
from research.traces.rows import (
    Cells,
    InvalidCell,
    Trace,
    TraceRow,
    collect,
    level,
    maybe,
    names,
    number,
    size_bytes,
    tasks_of,
    text,
    whole,
)

COLUMNS = (
    "workload_id", "submit_s", "tenant", "priority", "duration_s", "tasks", "gpus_per_task", "gpu_type",
    "cpus_per_task", "memory_bytes", "tables", "user", "max_runtime_s", "recurring",
    "min_tasks", "max_tasks",
)  # fmt: skip
"""The columns of Mizzen's own format; those in `OPTIONAL` may be missing or empty."""
OPTIONAL = {
    "priority", "gpu_type", "cpus_per_task", "memory_bytes", "tables", "user", "max_runtime_s", "recurring",
    "min_tasks", "max_tasks",
}  # fmt: skip
_PHILLY = {"timestamp", "duration", "num_gpus", "cluster"}
_OPENB = {"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "creation_time", "deletion_time"}
_FORMATS = ("philly", "openb", "csv", "parquet")
_MEBIBYTE = 1 << 20


def read_trace(source: str, gpus_per_machine: int = 8) -> Trace:
    """Returns the valid and the bad rows of a trace. `source` is a path, or FORMAT:PATH.

    Raises:
        TraceError: the file cannot be read, or its header belongs to no known format.
    """
    form, path = _split(source)
    try:
        if form == "parquet":
            table = pyarrow.parquet.read_table(path)
            header, lines = table.column_names, _parquet_lines(table)
        else:
            header, lines = _csv_lines(path)
    except (OSError, UnicodeDecodeError, csv.Error, pyarrow.ArrowException) as error:
        raise TraceError(f"trace {source}: {error}") from None
    form = form if form in ("philly", "openb") else _recognise(source, header)
    if form == "philly":
        _demand(source, header, _PHILLY)
        return collect(lines, lambda line, cells: _philly(line, cells, gpus_per_machine))
    if form == "openb":
        _demand(source, header, _OPENB)
        return collect(lines, _openb)
    return collect(lines, _own)


def _split(source: str) -> tuple[str | None, Path]:
    form, colon, path = source.partition(":")
    if colon and form in _FORMATS:
        return form, Path(path)
    if Path(source).suffix in (".parquet", ".pq"):
        return "parquet", Path(source)
    return None, Path(source)


def _recognise(source: str, header: list[str]) -> str:
    columns = set(header)
    if columns >= set(COLUMNS) - OPTIONAL:
        unknown = sorted(columns - set(COLUMNS))
        if unknown:
            raise TraceError(f"trace {source}: column {unknown[0]!r}: columns are {', '.join(COLUMNS)}")
        return "own"
    for form, needed in (("philly", _PHILLY), ("openb", _OPENB)):
        if columns >= needed:
            return form
    missing = ", ".join(sorted(set(COLUMNS) - OPTIONAL - columns))
    raise TraceError(
        f"trace {source}: header {header}: lacks {missing}, and is not the header of the Philly trace"
        f" ({', '.join(sorted(_PHILLY))}) or of openb pods ({', '.join(sorted(_OPENB))})"
    )


def _demand(source: str, header: list[str], needed: set[str]) -> None:
    missing = sorted(needed - set(header))
    if missing:
        raise TraceError(f"trace {source}: header {header}: lacks {', '.join(missing)}")


def _csv_lines(path: Path) -> tuple[list[str], Iterator[tuple[int, Cells]]]:
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
    header = [str(name).strip() for name in reader.fieldnames or []]
    reader.fieldnames = header
    return header, ((reader.line_num, cells) for cells in reader)


def _parquet_lines(table: pyarrow.Table) -> Iterator[tuple[int, Cells]]:
    return enumerate(_cells(table), start=1)


def _cells(table: pyarrow.Table) -> Iterable[Cells]:
    for batch in table.to_batches():
        yield from batch.to_pylist()


def _own(line: int, cells: Cells) -> TraceRow:
    if None in cells:  # `csv.DictReader` stores the cells beyond the last column under the key None.
        raise InvalidCell("the end", cells[None], f"a row must have {len(cells) - 1} cells")  # type: ignore[index]
    cpus = maybe(number, cells, "cpus_per_task")
    row = TraceRow(
        text(cells, "workload_id"),
        number(cells, "submit_s"),
        text(cells, "tenant"),
        maybe(level, cells, "priority"),
        number(cells, "duration_s"),
        whole(cells, "tasks", 1, 1_000_000),
        whole(cells, "gpus_per_task", 0, 1024),
        maybe(names, cells, "gpu_type"),
        None if cpus is None else ceil(1000 * cpus),
        maybe(size_bytes, cells, "memory_bytes"),
        maybe(names, cells, "tables"),
        line,
        maybe(text, cells, "user"),
        maybe(number, cells, "max_runtime_s"),
        maybe(text, cells, "recurring"),
        maybe(partial(whole, least=1, most=1_000_000), cells, "min_tasks"),
        maybe(partial(whole, least=1, most=1_000_000), cells, "max_tasks"),
    )
    if (row.min_tasks or 0) > (row.max_tasks or 0):
        raise InvalidCell("max_tasks", cells.get("max_tasks"), f"must be at least min_tasks, {row.min_tasks}")
    if row.max_tasks is not None and row.min_tasks is None:
        raise InvalidCell("min_tasks", cells.get("min_tasks"), "must be given with max_tasks")
    if row.max_runtime_s is not None and row.max_runtime_s < row.duration_s:
        raise InvalidCell("max_runtime_s", cells["max_runtime_s"], f"must be at least duration_s, {row.duration_s:g}")
    if row.gpus == 0 and row.gpu_types:
        raise InvalidCell("gpu_type", cells["gpu_type"], "must be empty where gpus_per_task is 0")
    if row.gpus and row.gpu_types == ():
        raise InvalidCell("gpu_type", cells["gpu_type"], "must name a GPU type, or be empty for a random one")
    if row.gpus == 0 and row.cpus_milli_per_task == 0 and row.memory_bytes_per_task == 0:
        raise InvalidCell("cpus_per_task", cells["cpus_per_task"], "a task must need GPUs, CPUs or memory")
    return row


def _philly(line: int, cells: Cells, gpus_per_machine: int) -> TraceRow:
    """Reads a row of Microsoft's Philly trace. `timestamp` is local time without a zone, and is read as UTC."""
    stamp = text(cells, "timestamp")
    try:
        submit_s = datetime.fromisoformat(stamp + "+00:00").timestamp()
    except ValueError:
        raise InvalidCell("timestamp", stamp, "must be a time such as 2017-10-09 07:01:55") from None
    tasks, gpus = tasks_of(whole(cells, "num_gpus", 1, 1 << 20), gpus_per_machine)
    tenant, duration_s = text(cells, "cluster"), number(cells, "duration")
    return TraceRow(f"philly-{line:06d}", submit_s, tenant, None, duration_s, tasks, gpus, None, None, None, None, line)


def _openb(line: int, cells: Cells) -> TraceRow:
    """Reads a row of Alibaba's openb pods. A share of a GPU (`gpu_milli` below 1000) takes a whole slot.

    `qos` is the tenant. A pod ran from `scheduled_time` (if that is empty: from `creation_time`) to `deletion_time`.
    """
    created_s, deleted_s = number(cells, "creation_time"), number(cells, "deletion_time")
    scheduled_s = maybe(number, cells, "scheduled_time")
    began_s = created_s if scheduled_s is None else scheduled_s
    if deleted_s < began_s:
        raise InvalidCell("deletion_time", cells["deletion_time"], f"must not be before the pod's start at {began_s:g}")
    gpus, share = whole(cells, "num_gpu", 0, 1024), maybe(number, cells, "gpu_milli") or 0.0
    if share > 1000:
        raise InvalidCell("gpu_milli", cells["gpu_milli"], "must be from 0 to 1000")
    if gpus == 0 and share:
        gpus = 1
    return TraceRow(
        text(cells, "name"),
        created_s,
        str(maybe(text, cells, "qos") or "none").lower(),
        None,
        deleted_s - began_s,
        1,
        gpus,
        maybe(names, cells, "gpu_spec") if gpus else None,
        whole(cells, "cpu_milli"),
        whole(cells, "memory_mib") * _MEBIBYTE,
        None,
        line,
    )
