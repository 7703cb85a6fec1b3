"""Large instances as Parquet: round trips, and errors that name the file, column and row."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tetris.small import small_instance
from tetris.columns import Columns
from tetris.documents import InstanceDocumentError
from tetris.folders import read_folder, write_folder


@pytest.mark.parametrize("seed", range(4))
def test_round_trip(seed: int, tmp_path: Path) -> None:
    """All columns are equal after writing and reading."""
    columns = Columns.of(small_instance(seed, 9, 4, 12))
    write_folder(columns, tmp_path / "x")
    again = read_folder(tmp_path / "x")
    for field in fields(Columns):
        assert np.array_equal(getattr(again, field.name), getattr(columns, field.name)), field.name


@pytest.mark.parametrize(
    ("file", "column", "values", "said"),
    [
        ("tables", "home", ["r0", "r9", "r0"], "tables.home: row 1: 'r9': must be one of r0, r1"),
        ("tables", "name", ["a", "b", "a"], "tables.name: 'a' appears twice"),
        ("tables", "size_bytes", [1.0, 2.0, -3.0], "tables.size_bytes: row 2: -3.0: must be 0, or from 1e-20 to 1e+20"),
        ("tables", "size_bytes", [1.0, 2.0, float("nan")], "tables.size_bytes: row 2: nan: must be 0, or from"),
        ("tables", "size_bytes", [1.0, 2e20, 1.0], "tables.size_bytes: row 1: 2e+20: must be 0, or from"),
        ("tables", "size_bytes", ["1", "2", "3"], "column size_bytes is string: it must be double"),
        ("tables", "name", ["a", "", "b"], "tables.parquet: column name, row 1: '': must not be empty"),
        ("tables", "replicas", [["r0", "r0"], [], []], "tables.replicas: row 0: 'r0' appears twice"),
        ("tables", "replicas", [[], [None], []], "tables.replicas: row 1: null: must name a region"),
        ("tables", "replicas", [["r1"], [], []], "'r1' is the table's home: replicas must be elsewhere"),
        ("jobs", "app", ["", None, None], "jobs.parquet: column app, row 0: '': must not be empty"),
        ("jobs", "priority", [1.0, 1.5, 2.0], "column priority is double: it must be int64"),
        ("regions", "storage_bytes", [1.0, 1e60], "regions.1.storage_bytes: 1e+60: must be 0, or from"),
        ("regions", "gpu_hours", [[("a", 1.0), ("a", 2.0)], []], "regions.gpu_hours: row 0: one of a appears twice"),
        ("tables", "size_bytes", [1.0, None, 2.0], "column size_bytes, row 1: null"),
        ("tables", "size_bytes", ["a", "b", "c"], "column size_bytes is string: it must be double"),
        ("tables", "replicas", [["r9"], [], []], "tables.replicas: row 0: 'r9'"),
        ("jobs", "kind", ["ml", "ml", "flink"], "jobs.kind: row 2: 'flink': must be one of ml, spark, presto"),
        ("jobs", "priority", [1, 0, 1], "jobs.priority: row 1: 0: must be at least 1 and at most 7"),
        ("job_tables", "table", [0, 3, 1], "job_tables.table: row 1: 3: must be at least 0 and at most 2"),
        ("job_tables", "job", None, "column job is missing"),
    ],
)
def test_errors_name_file_column_and_row(
    tmp_path: Path, file: str, column: str, values: list[object] | None, said: str
) -> None:
    """An unusable folder is rejected with the file, column, row and value."""
    given = small_instance(1, 3, 2, 3)
    columns = Columns.of(replace(given, tables=tuple(replace(t, home="r1", replicas=()) for t in given.tables)))
    write_folder(columns, tmp_path)
    path = tmp_path / f"{file}.parquet"
    table = pq.read_table(path)
    if file == "job_tables":
        table = pa.table({"job": [0, 1, 2], "table": [0, 1, 2]})
    at = table.column_names.index(column)
    array = pa.array(values, table.schema.types[at]) if column.endswith("_hours") else values
    pq.write_table(table.remove_column(at) if values is None else table.set_column(at, column, [array]), path)
    with pytest.raises(InstanceDocumentError) as refused:
        read_folder(tmp_path)
    assert said in str(refused.value)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    """A missing or invalid file is named in the error."""
    with pytest.raises(InstanceDocumentError, match=r"^instance\.json: No such file"):
        read_folder(tmp_path)
    for text, said in (
        ("[]", r"^instance\.json: document: \[\]: must be an object"),
        ("null", r"^instance\.json: document: None"),
        ('{"version": 1, "tables": []}', r"^instance\.json: tables: \[\]: unknown"),
        ('{"version": 1}', r"^regions\.parquet: cannot be read: No such file"),
    ):
        (tmp_path / "instance.json").write_text(text)
        with pytest.raises(InstanceDocumentError, match=said):
            read_folder(tmp_path)
    (tmp_path / "regions.parquet").write_text("PAR1junk")
    with pytest.raises(InstanceDocumentError, match=r"^regions\.parquet: is not Parquet"):
        read_folder(tmp_path)
