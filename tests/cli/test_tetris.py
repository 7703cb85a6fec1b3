"""Commands for data with the real API: partitions of tables, settings of regions, usage files, Tetris instances."""

import json
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pyarrow
import pyarrow.parquet
import pytest
from sqlalchemy import delete, select, update

from domain.instance import Reads
from infra.db.logs import UsageRun
from infra.db.models import Datacenter
from infra.db.placement_runs import PlacementRun, open_placement_run
from infra.db.session import transaction
from infra.db.tables import ReplicaPartition, Table
from infra.db.usage import recurring_jobs
from mizzen.objects import open_store
from mizzen_client.cli.app import run
from mizzen_client.errors import Conflict
from server.tetris_commands import tetris
from server.usage_files import UsageFileError, read_usage
from tests.cli.service import Service
from tetris.documents import read_instance, read_reads

Capture = pytest.CaptureFixture[str]
Write = Callable[[str], Path]
HEADER = "run,job,kind,tables,ended_at,cpu_hours,gpu_type,gpu_hours,priority"
GOOD = "r1,daily,spark,web.logs,2026-11-21T03:00:00Z,12.5,,,"


@pytest.fixture
def logs(as_operator: Service, capsys: Capture) -> Iterator[Service]:
    """Yields the service with a table of one partition and without usage records."""
    open_store(as_operator.folder.as_uri()).put("tables/web.logs/ds=1/a", b"12345")
    assert run(["tables", "add", "web.logs", "--home-region", "north"]) == 0
    capsys.readouterr()
    yield as_operator
    with transaction(as_operator.engine) as session:
        session.execute(delete(UsageRun))
        session.execute(delete(Table).where(Table.name == "web.logs"))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a function that writes a usage file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "usage.csv"
        path.write_text(text)
        return path

    return write


def command(*arguments: object) -> int:
    """Runs `mizzen tetris`; returns its exit code."""
    return tetris.main([str(a) for a in arguments], standalone_mode=False) or 0


def tables_there(capsys: Capture) -> list[dict[str, Any]]:
    """Returns the tables that the API lists."""
    assert run(["tables", "list", "-o", "json"]) == 0
    return list(json.loads(capsys.readouterr().out))


def _recorded(service: Service) -> list[str]:
    with transaction(service.engine) as session:
        return [
            f"{r.source} {r.run}" for r in session.scalars(select(UsageRun).order_by(UsageRun.source, UsageRun.run))
        ]


def test_partitions_are_appended_and_listed(logs: Service, capsys: Capture) -> None:
    """An appended partition is listed and counts in the table's size; an append with another size is an error."""
    open_store(logs.folder.as_uri()).put("tables/web.logs/ds=2/a", b"123")
    append = ["tables", "append", "web.logs", "ds=2", "--bytes"]
    assert run([*append, "3"]) == run([*append, "3"]) == 0
    assert run([*append, "4"]) == 5
    assert "partition ds=2 exists with 3 and cannot be changed" in capsys.readouterr().err
    assert run(["tables", "partitions", "web.logs", "-o", "name"]) == 0
    assert capsys.readouterr().out.split() == ["ds=1", "ds=2"]
    assert run(["tables", "list", "--namespace", "web"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["web.logs", "8", "B", "north", "north"]


def test_regions_are_set_and_exported(logs: Service, tmp_path: Path, capsys: Capture) -> None:
    """`regions set` accepts sizes with units and CPU quotas by app; the exported instance has both."""
    assert run(["regions", "set", "north", "--storage", "1.5PB", "--cpu-hours", "spark=100"]) == 0
    assert command("export", tmp_path / "instance.json") == 0
    (region,) = read_instance((tmp_path / "instance.json").read_bytes()).regions
    assert (region.storage_bytes, region.cpu_hours, region.gpu_hours) == (1.5e15, {"spark": 100.0}, {"a100": 192.0})
    assert run(["regions", "set", "north", "--storage", "2 KiB", "--no-cpu-hours", "-o", "json"]) == 0
    assert command("export", "--window", "1") == 0
    out = capsys.readouterr().out
    assert '"storage_bytes": 2048' in out and "1.3 PiB" in out
    for wrong in (["--storage", "much"], ["--storage", "1iB"], ["--cpu-hours", "spark=x"], []):
        assert run(["regions", "set", "north", *wrong]) == 2
    assert "'much' is not a size such as" in capsys.readouterr().err


def test_partitions_go_to_datacenters(logs: Service, write: Write, tmp_path: Path, capsys: Capture) -> None:
    """`tetris assign` stores the datacenter of every partition, also of those that the plan does not move."""
    instance, plan, reads = (tmp_path / f"{name}.json" for name in ("instance", "plan", "reads"))
    run(["regions", "set", "north", "--storage", "1TB"])
    with pytest.raises(Conflict, match="region north has no datacenters"):
        command("export", instance, "--region", "north")
    open_store(logs.folder.as_uri()).put("tables/web.logs/ds=2/a", b"123")
    assert run(["tables", "append", "web.logs", "ds=2", "--bytes", "3"]) == 0
    with transaction(logs.engine) as session:
        session.add_all(Datacenter(region="north", name=name, storage_bytes=100) for name in ("d1", "d2"))
    try:
        ended = datetime.now(UTC) - timedelta(hours=1)
        assert command("usage", "import", write(f"{HEADER}\nr1,daily,ml,web.logs/ds=2,{ended},,,,\n")) == 0
        assert command("export", instance, "--region", "north") == 0
        assert command("export", tmp_path / "all.json", "--reads", reads) == 0
        assert read_reads(reads.read_bytes()) == Reads({"web.logs/ds=2": 3.0}, {"ml/daily": ("web.logs/ds=2",)})
        found = read_instance(instance.read_bytes())
        logs_of = {t.name: t.home for t in found.tables if t.name.startswith("web.logs/")}
        assert list(logs_of) == ["web.logs/ds=1", "web.logs/ds=2"]
        assert [j.tables for j in found.jobs] == [("web.logs/ds=2",)]
        plan.write_text('{"version": 1, "homes": {"web.logs/ds=1": "north/d2"}}')
        capsys.readouterr()
        for said in (f"{len(found.tables)} assigned, 0 unchanged", f"0 assigned, {len(found.tables)} unchanged"):
            assert command("assign", instance, plan) == 0
            assert capsys.readouterr().out.strip() == said
        assert command("export", "--region", "north") == 0
        again = {t["name"]: t["home"] for t in json.loads(capsys.readouterr().out)["tables"]}
        assert again == {t.name: t.home for t in found.tables} | {"web.logs/ds=1": "north/d2"}
        plan.write_text('{"version": 1, "homes": {"web.logs/ds=9": "north/d2"}}')
        assert command("assign", instance, plan) == 2
        assert "'web.logs/ds=9' is not a table of the instance" in capsys.readouterr().err
        with pytest.raises(click.UsageError, match="--reads: not with --region"):
            command("export", instance, "--region", "north", "--reads", reads)
    finally:
        with transaction(logs.engine) as session:
            session.execute(update(ReplicaPartition).values(datacenter=None))
            session.execute(delete(Datacenter))


def test_a_file_is_imported_once(logs: Service, write: Write, capsys: Capture) -> None:
    """CSV and Parquet files of the same runs are equivalent; a second import records nothing."""
    path = write(f"{HEADER}\n{GOOD}\nr2,train,ml,,2026-11-21T05:30:00+02:00,,a100,64,2\n")
    rows = [
        {"run": "r1", "job": "daily", "kind": "spark", "tables": ["web.logs"], "cpu_hours": 12.5, "gpu_hours": None,
         "ended_at": datetime(2026, 11, 21, 3, tzinfo=UTC), "gpu_type": None, "priority": None},
        {"run": "r2", "job": "train", "kind": "ml", "tables": [], "cpu_hours": None, "gpu_hours": 64.0,
         "ended_at": datetime(2026, 11, 21, 3, 30, tzinfo=UTC), "gpu_type": "a100", "priority": 2},
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"))
    assert [r.run for r in read_usage(path)] == [r.run for r in read_usage(path.with_suffix(".parquet"))]
    assert (
        command("usage", "import", path) == command("usage", "import", path.with_suffix(".parquet"), "-o", "json") == 0
    )
    text, body = capsys.readouterr().out.split("\n", 1)
    assert text == "2 recorded, 0 known before, 0 skipped"
    assert json.loads(body) == {"recorded": 0, "known": 2, "skipped": 0}
    with transaction(logs.engine) as session:
        first, second = session.scalars(select(UsageRun).order_by(UsageRun.run))
        assert (first.source, first.tables, first.app, first.priority) == ("spark", ["web.logs"], "spark", 7)
        assert (second.gpu_hours, second.priority, second.source) == ({"a100": 64.0}, 2, "ml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",daily,spark,,2026-11-21T03:00:00Z,,,,", "run: is missing"),
        ("r2,,spark,,2026-11-21T03:00:00Z,,,,", "job: is missing"),
        ("r2,daily,hive,,2026-11-21T03:00:00Z,,,,", "kind: must be 'ml', 'spark' or 'presto', it is 'hive'"),
        ("r2,daily,spark,Web,2026-11-21T03:00:00Z,,,,", "tables[0]: must be a name, or namespace.name"),
        ("r2,daily,spark,web.logs/,2026-11-21T03:00:00Z,,,,", "tables[0]: must be a name, or namespace.name"),
        ("r2,daily,spark,a|a,2026-11-21T03:00:00Z,,,,", "tables: a: must occur once"),
        ("r2,daily,spark,,2026-11-21T03:00:00,,,,", "ended_at: must be a time with its zone, such as"),
        ("r2,daily,spark,,yesterday,,,,", "ended_at: must be a time with its zone, such as"),
        (",,hive sql,,2026-11-21T03:00:00Z,much,,,", "run: is missing; job: is missing; kind: must be 'ml', "),
        ("r2,daily,spark,,2026-11-21T03:00:00Z,much,,,", "cpu_hours: must be a number, it is 'much'"),
        ("r2,daily,spark,,2026-11-21T03:00:00Z,-1,,,", "cpu_hours: must be at least 0, it is -1"),
        ("r2,daily,spark,,2026-11-21T03:00:00Z,nan,,,", "cpu_hours: must be a finite number, it is nan"),
        ("r2,daily,spark,,2026-11-21T03:00:00Z,,,5,", "gpu_hours: 5: must be 0 without a gpu_type"),
        ("r2,daily,spark,,2026-11-21T03:00:00Z,,A 100,5,", "gpu_type: must be 1 to 63 lower-case"),
        ("r2,daily,spark,,2026-11-21T03:00:00Z,,,,0", "priority: must be at least 1, it is 0"),
        ("r2,daily,spark,,2026-11-21T03:00:00Z,,,,1.5", "priority: must be a whole number, it is 1.5"),
        (GOOD, "run: 'r1': is also in row 2: run ids must be unique"),
        (GOOD + ",more", "the end: ['more']: the row has more cells than the header"),
        ("r2,daily,spark,web.lags,2026-11-21T03:00:00Z,,,,", "tables[0]: 'web.lags': there is no such table"),
        ("r2,daily,spark,a/ds=1,2026-11-21T03:00:00Z,,,,", "tables[0]: 'a/ds=1': there is no such table"),
        (
            "r2,daily,spark,web.logs/ds=1|web.logs/ds=9,2026-11-21T03:00:00Z,,,,",
            "tables[1]: 'web.logs/ds=9': table web.logs has no such partition; append it first",
        ),
    ],
)
def test_wrong_rows(logs: Service, write: Write, capsys: Capture, line: str, message: str) -> None:
    """The error of an invalid row has its number, column and value. `--bad-rows skip` records the other rows."""
    path = write(f"{HEADER}\n{GOOD}\n{line}\n{GOOD.replace('r1', 'r3')}\n")
    assert command("usage", "import", path) == 2
    assert f"{path}: row 3: {message}" in capsys.readouterr().err
    assert _recorded(logs) == []
    assert command("usage", "import", path, "--bad-rows", "skip") == 0
    out, err = capsys.readouterr()
    assert (out, f"{path}: row 3: {message}" in err) == ("2 recorded, 0 known before, 1 skipped\n", True)
    assert _recorded(logs) == ["spark r1", "spark r3"]


def test_a_source_of_its_own(write: Write) -> None:
    """A usage file can have a source column, but the source `mizzen` is reserved."""
    path = write(f"source,{HEADER}\npresto-eu,{GOOD}\nmizzen,{GOOD}\n")
    first, second = read_usage(path)
    assert first.run is not None and first.run["source"] == "presto-eu"
    assert second.number == 3
    assert second.wrong == "source: 'mizzen': must be another name; mizzen records its own workloads itself"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column run: missing"),
        ("run,job,kind,tables", "column ended_at: missing; required columns are run, job, kind, tables, ended_at"),
        (f"{HEADER},user", "column 'user': unknown; the columns are run, job, kind"),
        ("\udcff", "codec can't decode"),
    ],
)
def test_files_that_are_no_usage(write: Write, capsys: Capture, text: str, message: str) -> None:
    """A missing or unknown column in the header is an error before any row is read."""
    path = write("")
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageFileError, match=r"usage\.csv"):
        read_usage(path)
    assert command("usage", "import", path) == 2
    assert message in capsys.readouterr().err


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    """A file named .parquet whose content is not Parquet is an error."""
    path = tmp_path / "usage.parquet"
    path.write_text(HEADER)
    with pytest.raises(UsageFileError, match=r"usage\.parquet"):
        read_usage(path)


def test_the_example_of_the_page(logs: Service, write: Write, checkout: Path, capsys: Capture) -> None:
    """The import of the example file in docs/data.md has the documented output and results in the documented job."""
    page = (checkout / "docs/data.md").read_text()
    file = page.partition("<<'EOF'\n")[2].partition("    EOF")[0]
    for key in ("tables/ads.clicks/ds=1/a", "tables/digits/a"):
        open_store(logs.folder.as_uri()).put(key, b"1")
    there = {t["name"] for t in tables_there(capsys)}
    missing = {"ads.clicks", "digits"} - there
    for name in missing:
        assert run(["tables", "add", name, "--home-region", "north"]) == 0
    capsys.readouterr()
    path = write(textwrap.dedent(file))
    for _ in range(2):
        assert command("usage", "import", path) == 0
        assert f"`{capsys.readouterr().out.strip()}`" in page
    with transaction(logs.engine) as session:
        found = recurring_jobs(session, datetime(2026, 11, 22, 12, tzinfo=UTC), 30.0)
        (job,) = [j for j in found if j.kind == "spark"]
        assert (job.name, job.cpu_hours, job.weight) == ("spark/daily-clicks", 126.0, 1.0)
        session.execute(delete(Table).where(Table.name.in_(missing)))
    assert "has 126 CPU hours and weight 1" in page


def test_long_files_go_in_batches(logs: Service, write: Write, capsys: Capture) -> None:
    """A file that needs several requests is imported whole; an error of the API has the row number of the file."""
    ended = datetime.now(UTC) - timedelta(hours=1)
    tables = ["gone" if n == 777 else "web.logs" for n in range(1200)]
    lines = [f"r{n:04d},job-{n % 3},presto,{table},{ended.isoformat()}" for n, table in enumerate(tables)]
    path = write("\n".join(["run,job,kind,tables,ended_at", *lines]))
    assert command("usage", "import", path, "--bad-rows", "skip") == 0
    out, err = capsys.readouterr()
    assert out == "1199 recorded, 0 known before, 1 skipped\n" and "row 779: tables[0]: 'gone'" in err
    assert len(_recorded(logs)) == 1199
    assert run(["regions", "set", "north", "--storage", "1TB"]) == 0
    capsys.readouterr()
    assert command("export") == 0
    jobs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["jobs"]
    found = [(j["name"], j["weight"], j["tables"]) for j in jobs]
    assert found == [(f"presto/job-{n}", weight, ["web.logs"]) for n, weight in enumerate((399.0, 400.0, 400.0))]


@pytest.mark.parametrize(("state", "code"), [("failed", 5), ("ended", 0)])
def test_plan_ends_as_the_placement_run_does(as_operator: Service, capsys: Capture, state: str, code: int) -> None:
    """`tetris plan` exits with 5 and the reason if the plan fails, and with 0 if it succeeds."""
    problem = "no region has storage set" if state == "failed" else None

    def decide() -> None:
        """Ends the placement run as the worker would; these tests run no worker."""
        while True:
            with transaction(as_operator.engine) as session:
                placement_run = open_placement_run(session)
                if placement_run is not None:
                    placement_run.state, placement_run.problem = state, problem
                    return
            time.sleep(0.05)

    with ThreadPoolExecutor(1) as worker:
        decided = worker.submit(decide)
        assert run(["tetris", "plan", "--dry-run"]) == code
        decided.result()
    assert (problem or "a dry run") in capsys.readouterr().out
    with transaction(as_operator.engine) as session:
        session.execute(delete(PlacementRun))
