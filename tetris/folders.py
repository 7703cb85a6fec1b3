"""Reads and writes large instances as a folder of Parquet files, without creating an object for each row.

`regions.parquet`, `tables.parquet` and `jobs.parquet` have one row per region, table and job. `job_tables.parquet` has
the tables of each job, as row numbers. `instance.json` has all other fields. `docs/tetris-instances.md` documents the
columns.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from domain.instance import LEAST_AMOUNT, MOST_AMOUNT, TetrisInstance
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from tetris.columns import KINDS, NONE, Columns, Floats, Ints, Longs
from tetris.documents import AMOUNT, InstanceDocumentError, instance_document, read_file, read_head, read_instance

_HOURS = pa.map_(pa.string(), pa.float64())
_SCHEMAS = {
    "regions": {"name": pa.string(), "storage_bytes": pa.float64(), "gpu_hours": _HOURS, "cpu_hours": _HOURS},
    "tables": {
        "name": pa.string(), "size_bytes": pa.float64(), "home": pa.string(), "replicas": pa.list_(pa.string()),
    },
    "jobs": {
        "name": pa.string(), "kind": pa.string(), "app": pa.string(), "gpu_type": pa.string(),
        "gpu_hours": pa.float64(), "cpu_hours": pa.float64(), "priority": pa.int64(), "weight": pa.float64(),
    },
    "job_tables": {"job": pa.int64(), "table": pa.int64()},
}  # fmt: skip
_MAY_BE_NULL = {"app", "gpu_type"}
_LINE = "\n"


def write_folder(columns: Columns, folder: Path) -> None:
    """Writes an instance to a folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    quota = None if np.isinf(columns.move_quota_bytes) else columns.move_quota_bytes
    head = instance_document(TetrisInstance((), (), (), columns.weights, columns.home_threshold, quota))
    (folder / "instance.json").write_text(
        json.dumps({k: v for k, v in head.items() if k not in ("regions", "tables", "jobs")}, indent=1) + "\n"
    )
    regions = np.array(columns.regions, dtype=object)
    _write(folder, "regions", [
        columns.regions, columns.capacity_bytes, _maps(columns.gpu_types, columns.supply_h),
        _maps(columns.apps, columns.quota_h),
    ])  # fmt: skip
    replicas = pa.ListArray.from_arrays(
        pa.array(columns.replica_start, pa.int32()), pa.array(regions[columns.replica], pa.string())
    )
    _write(folder, "tables", [columns.table_names, columns.size_bytes, regions[columns.home], replicas])
    _write(folder, "jobs", [
        columns.job_names, np.array(KINDS, object)[columns.kind], _named(columns.apps, columns.app),
        _named(columns.gpu_types, columns.gpu_type), columns.gpu_h, columns.cpu_h, columns.priority.astype(np.int64),
        columns.weight,
    ])  # fmt: skip
    job = np.repeat(np.arange(len(columns.kind)), np.diff(columns.job_start))
    _write(folder, "job_tables", [job, columns.job_table.astype(np.int64)])


def read_folder(folder: Path) -> Columns:
    """Reads an instance from a folder.

    Raises:
        DocumentError: a file or a column is missing or has a wrong type, a value is out of range, or a name is
        duplicated
            or unknown. The message names the file, the column and the row.
    """
    try:
        head = read_head(read_file(folder / "instance.json"))
    except InstanceDocumentError as error:
        raise InstanceDocumentError(f"instance.json: {str(error).replace(_LINE, f'{_LINE}instance.json: ')}") from None
    given = _read(folder, "regions")
    rows = zip(*(given[name].to_pylist() for name in _SCHEMAS["regions"]), strict=True)
    body = [
        {"name": n, "storage_bytes": s, "gpu_hours": _hours(i, "gpu_hours", g), "cpu_hours": _hours(i, "cpu_hours", c)}
        for i, (n, s, g, c) in enumerate(rows)
    ]
    return _columns(folder, read_instance(json.dumps({**head, "regions": body, "tables": [], "jobs": []})))


def _columns(folder: Path, instance: TetrisInstance) -> Columns:
    tables, jobs, edges = (_read(folder, name) for name in ("tables", "jobs", "job_tables"))
    base = Columns.of(instance)
    _unique("tables", tables["name"])
    _unique("jobs", jobs["name"])
    replica_rows = np.asarray(pc.list_parent_indices(tables["replicas"]), np.int64)
    replica_start = np.searchsorted(replica_rows, np.arange(len(tables) + 1)).astype(np.int64)
    home = _numbers("tables", "home", tables["home"], base.regions)
    replica = _numbers("tables", "replicas", pc.list_flatten(tables["replicas"]), base.regions)
    _elsewhere(home, replica_rows, replica, base.regions)
    gpu_types = tuple(sorted({*base.gpu_types, *(g for g in pc.unique(jobs["gpu_type"]).to_pylist() if g is not None)}))
    supply = np.zeros((len(gpu_types), len(base.regions)))
    for row, name in enumerate(base.gpu_types):
        supply[gpu_types.index(name)] = base.supply_h[row]
    job, table = (np.asarray(edges[name]) for name in ("job", "table"))
    job_start, job_table = _edges(job, table, len(jobs), len(tables))
    priority = np.asarray(jobs["priority"])
    _within("jobs", "priority", priority, HIGHEST_LEVEL, LOWEST_LEVEL)
    return Columns(
        regions=base.regions,
        table_names=tuple(tables["name"].to_pylist()),
        job_names=tuple(jobs["name"].to_pylist()),
        gpu_types=gpu_types,
        apps=base.apps,
        capacity_bytes=base.capacity_bytes,
        supply_h=supply,
        quota_h=base.quota_h,
        size_bytes=_amount("tables", "size_bytes", tables),
        home=home,
        replica_start=replica_start,
        replica=replica,
        kind=_numbers("jobs", "kind", jobs["kind"], KINDS).astype(np.int8),
        app=_numbers("jobs", "app", jobs["app"], base.apps, others=True),
        gpu_type=_numbers("jobs", "gpu_type", jobs["gpu_type"], gpu_types),
        priority=priority.astype(np.int8),
        gpu_h=_amount("jobs", "gpu_hours", jobs),
        cpu_h=_amount("jobs", "cpu_hours", jobs),
        weight=_amount("jobs", "weight", jobs),
        job_start=job_start,
        job_table=job_table,
        weights=instance.weights,
        home_threshold=instance.home_threshold,
        move_quota_bytes=base.move_quota_bytes,
    )


def _elsewhere(home: Ints, rows: Longs, replica: Ints, regions: tuple[str, ...]) -> None:
    """Checks that replicas are in known regions, unique, and not at home. `rows` has the table of each replica."""

    def refuse(wrong: Any, what: Callable[[int], str]) -> None:
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            raise InstanceDocumentError(f"tables.replicas: row {rows[first]}: {what(first)}")

    refuse(replica == NONE, lambda _: "null: must name a region")
    refuse(replica == home[rows], lambda i: f"{regions[replica[i]]!r} is the table's home: replicas must be elsewhere")
    pairs = rows * len(regions) + replica
    _, first = np.unique(pairs, return_index=True)
    again = np.ones(len(pairs), np.bool_)
    again[first] = False
    refuse(again, lambda i: f"{regions[replica[i]]!r} appears twice: each region must appear once")


def _edges(job: Any, table: Any, jobs: int, tables: int) -> tuple[Longs, Ints]:
    _within("job_tables", "job", job, 0, jobs - 1)
    _within("job_tables", "table", table, 0, tables - 1)
    order = np.argsort(job, kind="stable")
    job, table = job[order], table[order]
    pairs = np.sort(job * max(tables, 1) + table)
    twice = np.flatnonzero(pairs[1:] == pairs[:-1])
    if len(twice):
        pair = divmod(int(pairs[twice[0]]), tables)
        raise InstanceDocumentError(
            f"job_tables: job {pair[0]}, table {pair[1]} appears twice: each table must appear once"
        )
    return np.searchsorted(job, np.arange(jobs + 1)).astype(np.int64), table.astype(np.int32)


def _write(folder: Path, name: str, values: list[Any]) -> None:
    schema = _SCHEMAS[name]
    arrays = [
        v if isinstance(v, pa.Array) else pa.array(v, kind) for v, kind in zip(values, schema.values(), strict=True)
    ]
    pq.write_table(pa.table(arrays, names=list(schema)), folder / f"{name}.parquet")


def _read(folder: Path, name: str) -> pa.Table:
    file = f"{name}.parquet"
    try:
        with (folder / file).open("rb"):
            table = pq.read_table(folder / file)
    except OSError as error:
        raise InstanceDocumentError(f"{file}: cannot be read: {error.strerror or str(error).splitlines()[0]}") from None
    except pa.ArrowException as error:
        raise InstanceDocumentError(f"{file}: is not Parquet: {str(error).splitlines()[0]}") from None
    out = []
    for column, kind in _SCHEMAS[name].items():
        if column not in table.column_names:
            raise InstanceDocumentError(
                f"{file}: column {column} is missing: the file has {', '.join(table.column_names)}"
            )
        try:
            if not _alike(table[column].type, kind):
                raise pa.ArrowInvalid
            values = table[column].cast(kind).combine_chunks()
        except pa.ArrowException:
            raise InstanceDocumentError(f"{file}: column {column} is {table[column].type}: it must be {kind}") from None
        if column not in _MAY_BE_NULL and values.null_count:
            row = int(np.flatnonzero(np.asarray(values.is_null()))[0])
            raise InstanceDocumentError(f"{file}: column {column}, row {row}: null: a value is required")
        if pa.types.is_string(kind) and len(empty := np.flatnonzero(np.asarray(pc.equal(values, ""), np.bool_))):
            raise InstanceDocumentError(f"{file}: column {column}, row {empty[0]}: '': must not be empty")
        out.append(values)
    return pa.table(out, names=list(_SCHEMAS[name]))


def _alike(given: Any, wanted: Any) -> bool:
    """Returns whether a column type is accepted. A string is not a number; lists and maps are checked by the cast."""
    if pa.types.is_dictionary(given):
        given = given.value_type
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(given) or pa.types.is_integer(given))
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(given))
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(given) or pa.types.is_large_string(given) or pa.types.is_null(given))
    return True


def _numbers(file: str, column: str, values: Any, names: tuple[str, ...], *, others: bool = False) -> Ints:
    """Converts names to numbers. Null becomes NONE; so does an unknown name if `others` is true."""
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    found = pc.index_in(values, pa.array(names, pa.string()))
    unknown = np.asarray(pc.and_(found.is_null(), values.is_valid()))
    if unknown.any() and not others:
        row = int(np.flatnonzero(unknown)[0])
        raise InstanceDocumentError(
            f"{file}.{column}: row {row}: {values[row].as_py()!r}: must be one of {', '.join(names)}"
        )
    return np.asarray(found.fill_null(NONE), np.int32)


def _amount(file: str, column: str, table: pa.Table) -> Floats:
    values = np.array(table[column], np.float64)
    wrong = np.flatnonzero(~((values == 0) | (values >= LEAST_AMOUNT) & (values <= MOST_AMOUNT)))
    if len(wrong):
        raise InstanceDocumentError(f"{file}.{column}: row {wrong[0]}: {values[wrong[0]]}: {AMOUNT}")
    return values


def _within(file: str, column: str, values: Any, least: int, most: int) -> None:
    wrong = np.flatnonzero((values < least) | (values > most))
    if len(wrong):
        row = wrong[0]
        raise InstanceDocumentError(
            f"{file}.{column}: row {row}: {values[row]}: must be at least {least} and at most {most}"
        )


def _unique(file: str, names: Any) -> None:
    if len(pc.unique(names)) < len(names):
        counted = pc.value_counts(names)
        twice = counted.field("values")[int(np.argmax(np.asarray(counted.field("counts"))))].as_py()
        raise InstanceDocumentError(f"{file}.name: {twice!r} appears twice: names must be unique")


def _hours(row: int, column: str, pairs: list[tuple[str, float]] | None) -> dict[str, float]:
    out = dict(pairs or ())
    if len(out) < len(pairs or ()):
        raise InstanceDocumentError(
            f"regions.{column}: row {row}: one of {', '.join(out)} appears twice: names must be unique"
        )
    return out


def _maps(names: tuple[str, ...], hours: Floats) -> Any:
    """Returns a map of the finite hours for each of the R regions."""
    rows = [[(n, float(h)) for n, h in zip(names, column, strict=True) if np.isfinite(h)] for column in hours.T]
    return pa.array(rows or [[]] * hours.shape[1], _HOURS)


def _named(names: tuple[str, ...], numbers: Ints) -> Any:
    return pa.array(np.array([*names, None], object)[numbers], pa.string())
