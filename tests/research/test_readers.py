"""Readers of traces: our own format in CSV and Parquet, Philly, and openb; bad rows are named by line and column."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from research.traces.errors import TraceError
from research.traces.rows import BadRow, refuse_bad, tasks_of
from research.traces.trace_readers import COLUMNS, read_trace

HEADER = ",".join(COLUMNS)
FULL = "w1,10,vision,2,3600,4,8,a100|h100,6.5,16GiB,clicks|pages,ann,7200,nightly,2,8"


def _write(folder: Path, *lines: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_every_column_is_read(tmp_path: Path) -> None:
    """All columns of a full row are read, with units, lists and sizes."""
    (row,) = read_trace(_write(tmp_path, HEADER, FULL)).rows
    assert (row.workload_id, row.submit_s, row.tenant, row.priority, row.duration_s) == ("w1", 10, "vision", 2, 3600)
    assert (row.tasks, row.gpus_per_task, row.gpus, row.gpu_types) == (4, 8, 32, ("a100", "h100"))
    assert (row.cpus_milli_per_task, row.memory_bytes_per_task) == (6500, 16 << 30)
    assert row.tables == ("clicks", "pages")
    assert (row.user, row.max_runtime_s, row.recurring) == ("ann", 7200, "nightly")
    assert (row.min_tasks, row.max_tasks) == (2, 8)


def test_what_is_missing_or_empty_is_left_to_be_drawn(tmp_path: Path) -> None:
    """A missing column and an empty cell are equal; `-` means that there are no tables."""
    header = "workload_id,submit_s,tenant,duration_s,tasks,gpus_per_task,priority,tables"
    first, second = read_trace(_write(tmp_path, header, "a,0,t,1,1,1,,", "b,0,t,1,1,1,3,-")).rows
    assert (first.priority, first.tables, first.gpu_types, first.cpus_milli_per_task) == (None, None, None, None)
    assert (second.priority, second.tables) == (3, ())


def test_rows_are_put_in_the_order_of_submission(tmp_path: Path) -> None:
    """Rows are sorted by submission time, then by id."""
    header = "workload_id,submit_s,tenant,duration_s,tasks,gpus_per_task"
    found = read_trace(_write(tmp_path, header, "c,5,t,1,1,1", "b,5,t,1,1,1", "a,9,t,1,1,1")).rows
    assert [row.workload_id for row in found] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("column", "value", "right"),
    [
        ("workload_id", "", "must not be empty"),
        ("submit_s", "soon", "must be a number of at least 0"),
        ("submit_s", "-1", "must be a number of at least 0"),
        ("submit_s", "inf", "must be a number of at least 0"),
        ("tenant", " ", "must not be empty"),
        ("priority", "0", "must be a number of at least 1"),
        ("priority", "8", "must be a whole number from 1 to 7"),
        ("priority", "2.5", "must be a whole number from 1 to 7"),
        ("duration_s", "nan", "must be a number of at least 0"),
        ("tasks", "0", "must be a number of at least 1"),
        ("gpus_per_task", "1.5", "must be a whole number from 0 to 1024"),
        ("gpu_type", "a100||h100", "must be different names separated by |"),
        ("gpu_type", "-", "must name a GPU type, or be empty for a random one"),
        ("cpus_per_task", "many", "must be a number of at least 0"),
        ("memory_bytes", "16 GiBs", "must be a size such as 512MiB or 16GB, or a whole number of bytes"),
        ("tables", "a|a", "must be different names separated by |"),
        ("max_runtime_s", "3599", "must be at least duration_s, 3600"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, column: str, value: str, right: str) -> None:
    """A bad row is reported with its line, column, value and what would be right; good rows stay."""
    cells = dict(zip(COLUMNS, FULL.split(","), strict=True)) | {column: value}
    trace = read_trace(_write(tmp_path, HEADER, FULL.replace("w1", "w0"), ",".join(cells.values())))
    assert trace.bad == [BadRow(3, column, value, right)]
    assert [row.workload_id for row in trace.rows] == ["w0"]


def test_a_gpu_type_without_gpus_is_wrong(tmp_path: Path) -> None:
    """A row with a GPU type but no GPUs is bad, and so is a row whose tasks need no resources."""
    lines = ("w1,0,t,1,5,1,0,a100,1,1,", "w2,0,t,1,5,1,0,,0,0,")
    trace = read_trace(_write(tmp_path, HEADER, *lines))
    assert [(row.line, row.column) for row in trace.bad] == [(2, "gpu_type"), (3, "cpus_per_task")]


def test_an_id_is_there_once_and_a_row_is_not_too_long(tmp_path: Path) -> None:
    """A row with a repeated id is bad, and the error names the first line; so is a row with too many cells."""
    trace = read_trace(_write(tmp_path, HEADER, FULL, FULL, FULL.replace("w1", "w2") + ",more"))
    assert str(trace.bad[0]) == "line 3: workload_id: 'w1': must be unique, but line 2 has the same id"
    assert trace.bad[1].column == "the end"


def test_bad_rows_are_refused_with_their_number(tmp_path: Path) -> None:
    """The error lists the first ten bad rows and the number of the others."""
    bad = [BadRow(k, "tasks", "0", "must be a number of at least 1") for k in range(2, 14)]
    with pytest.raises(TraceError) as refused:
        refuse_bad("t.csv", bad)
    assert "12 bad rows (`--bad-rows skip` ignores them)" in str(refused.value)
    assert "line 11: tasks: '0'" in str(refused.value)
    assert str(refused.value).endswith("and 2 more")


def test_parquet_is_the_same_as_csv(tmp_path: Path) -> None:
    """A Parquet file with typed columns gives the same rows as a CSV file."""
    start = ("w1", 10.0, "vision", 2, 3600, 4, 8, "a100|h100", 6.5, 16 << 30)
    values = (*start, "clicks|pages", "ann", 7200, "nightly", 2, 8)
    columns = {column: [value] for column, value in zip(COLUMNS, values, strict=True)}
    path = tmp_path / "trace.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    (theirs,), (ours,) = read_trace(str(path)).rows, read_trace(_write(tmp_path, HEADER, FULL)).rows
    assert theirs.line == 1
    assert theirs.memory_bytes_per_task == ours.memory_bytes_per_task
    for name in ("workload_id", "submit_s", "priority", "tasks", "gpu_types", "cpus_milli_per_task", "tables", "user"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert read_trace(f"parquet:{path}").rows == [theirs]


def test_philly_is_known_by_its_header(tmp_path: Path) -> None:
    """In a Philly trace, times are UTC, virtual clusters are tenants, and more than 8 GPUs are several tasks."""
    lines = (
        "timestamp,duration,num_gpus,gpu_time,cluster",
        "2017-10-09 07:01:55,66.0,16,1,11cb48",
        "yesterday,1,1,1,x",
    )
    path = _write(tmp_path, *lines)
    trace = read_trace(path)
    (row,) = trace.rows
    assert (row.workload_id, row.submit_s, row.tenant) == ("philly-000002", 1507532515.0, "11cb48")
    assert (row.tasks, row.gpus_per_task, row.duration_s, row.priority) == (2, 8, 66, None)
    assert str(trace.bad[0]) == "line 3: timestamp: 'yesterday': must be a time such as 2017-10-09 07:01:55"
    assert read_trace(f"philly:{path}") == trace


def test_gangs_of_which_only_the_gpus_are_known() -> None:
    """A gang of up to one machine is one task; a larger one has as few equal tasks as possible."""
    assert [tasks_of(gpus, 8) for gpus in (1, 7, 8, 12, 16, 17, 128)] == [
        (1, 1), (1, 7), (1, 8), (2, 6), (2, 8), (3, 6), (16, 8),
    ]  # fmt: skip


OPENB = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"


def test_openb_pods(tmp_path: Path) -> None:
    """In an openb trace, a share of a GPU is a slot; a pod runs from its scheduling or creation to its deletion."""
    lines = (
        "openb-pod-0000,12000,16384,1,460,,LS,Running,0,12537496,0",
        "openb-pod-0001,6000,12288,8,1000,V100M16|V100M32,BE,Succeeded,100,500,150",
        "openb-pod-0002,1000,2048,0,0,,,Pending,100,160,",
        "openb-pod-0003,1000,2048,1,1001,,LS,Failed,0,1,0",
        "openb-pod-0004,1000,2048,0,0,,LS,Failed,10,5,",
    )
    trace = read_trace(_write(tmp_path, OPENB, *lines))
    share, whole, cpu = trace.rows
    assert (share.gpus_per_task, share.gpu_types, share.tenant, share.duration_s) == (1, None, "ls", 12537496)
    assert (whole.gpus_per_task, whole.gpu_types, whole.submit_s, whole.duration_s) == (
        8,
        ("V100M16", "V100M32"),
        100,
        350,
    )
    assert (cpu.gpus, cpu.tenant, cpu.duration_s, cpu.memory_bytes_per_task) == (0, "none", 60, 2 << 30)
    assert [(row.line, row.column) for row in trace.bad] == [(5, "gpu_milli"), (6, "deletion_time")]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("missing.csv", "No such file"),
        ("a.csv", "header ['name', 'what']: lacks duration_s, gpus_per_task, submit_s, tasks, tenant, workload_id"),
        ("philly:a.csv", "lacks cluster, duration, num_gpus, timestamp"),
        ("parquet:a.csv", "Parquet magic bytes not found"),
        ("b.csv", "column 'colour': columns are workload_id"),
    ],
)
def test_a_trace_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
) -> None:
    """A missing file, an unknown header or a wrong format is named in the error."""
    monkeypatch.chdir(tmp_path)
    _write(tmp_path, "name,what", "a,b", name="a.csv")
    _write(tmp_path, HEADER + ",colour", FULL + ",red", name="b.csv")
    with pytest.raises(TraceError) as refused:
        read_trace(source)
    assert says in str(refused.value)
