"""console: what the pages cost the API on a large installation, and how large they are.

Rows are generated (`bench.console_rows`), with one region for the map. Each page is requested in this process, and its
best of several rounds counts. CPU is the time of this process beyond the execution of SQL statements. A statement reads
too much if its plan scans a table of workloads, attempts, allocations or events sequentially.

    python -m bench.console --machines 600 --waiting 300 --finished 2000      # a short form
"""

import asyncio
import gzip
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import httpx
from sqlalchemy import Engine, event, text

from bench.console_lists import ratio, table_of
from bench.console_open_page import EVENTS_PER_S, SPAN_S, shared, shares
from bench.console_rows import ConsoleRows, add_replicas, add_wide_region, fill
from bench.harness import Bench, Figure, Line, Suite
from bench.postgres import postgres
from console import fleet_pages
from console.application import create_app
from console.fleet_picture import RegionMaps
from domain.ids import log_prefix
from domain.log_segments import Segment
from infra.config.settings import Settings
from infra.db.migrate import upgrade
from infra.db.session import open_engine, transaction
from infra.db.tenants import ApiKey
from infra.keys import hash_api_key, load_master_key
from mizzen.objects import open_store

LINES = (
    Line("CPU of the dearest page beyond its queries, in ms", 20.0),
    Line("largest first page, gzipped, in kB", 60.0),
    Line("largest update, gzipped, in kB", 10.0),
    Line("largest map, in kB", 60.0),
    Line("CPU of a new version of a map beyond its queries, in ms", 40.0),
    Line("statements of lists that scan a large table", 0.0),
    Line("100 pages of ten people after a change, of one page (API and Postgres)", 3.0),
    Line("open page when nothing happens, in % of a core", 0.5),
    Line("open page with 100 events a second, in % of a core", 5.0),
    Line("dearest query of a list, of a plain read of its rows by key", 2.0),
    Line("map of a region of all machines, in kB", 60.0),
    Line("CPU of a new version of that map beyond its queries, in ms", 40.0),
)
_ROUNDS = 5
_LARGE = ("workload", "attempt", "allocation", "event")
_KEY = "mzn_bench"
_HOUR_AGO = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%dT%H:%MZ}"
_PEOPLE = 10
"""Browsers, with ten tabs each."""
_SERVICE = {"version": 1, "name": "chat", "tenant": "vision", "service": {"replicas": 48}, "run": "serve"}
_REPLICAS = 48
_LOG_SEGMENTS, _SEGMENT_LINES = 20, 500


@dataclass
class _Watch:
    """The SQL statements of requests, and the CPU time of the threads that execute them."""

    queries_s: float = 0.0
    began_s: dict[int, float] = field(default_factory=dict)
    statements: dict[str, Any] = field(default_factory=dict)
    of_page: dict[str, Any] = field(default_factory=dict)
    """The statements since the page's first request, with their parameters."""

    def follow(self, engine: Engine) -> None:
        """Watches an engine."""

        @event.listens_for(engine, "before_cursor_execute")
        def before(_c: Any, cursor: Any, statement: str, given: Any, _x: Any, _m: Any) -> None:
            self.statements.setdefault(statement, given)
            self.of_page.setdefault(statement, given)
            self.began_s[id(cursor)] = time.thread_time()

        @event.listens_for(engine, "after_cursor_execute")
        def after(_c: Any, cursor: Any, *_: Any) -> None:
            self.queries_s += time.thread_time() - self.began_s.pop(id(cursor))


@dataclass(frozen=True)
class _PageCost:
    cpu_ms: float
    body: bytes


async def _cost(client: httpx.AsyncClient, watch: _Watch, path: str, headers: dict[str, str]) -> _PageCost:
    best = _PageCost(float("inf"), b"")
    watch.of_page.clear()
    for _ in range(_ROUNDS):
        watch.queries_s, cpu_s = 0.0, time.process_time()
        answer = await client.get(f"/console{path}", headers=headers, timeout=300)
        cpu_ms = (time.process_time() - cpu_s - watch.queries_s) * 1000
        answer.raise_for_status()
        best = min(best, _PageCost(cpu_ms, answer.content), key=_cpu)
    return best


def _cpu(cost: _PageCost) -> float:
    return cost.cpu_ms


def _paths(rows: ConsoleRows, service: str) -> list[str]:
    running, waiting = (f"wl-{number:016d}" for number in (rows.finished, rows.finished + rows.machines * 9 // 10))
    return [
        "", "/queue", f"/queue?after={rows.waiting // 2}", "/workloads", "/workloads?phase=live&tenant=vision",
        "/workloads?phase=failed", "/workloads?phase=failed&tenant=robotics", "/workloads?phase=running",
        "/workloads?name=bert-12", "/workloads?label=team%3Dspeech", f"/workloads/{running}", f"/workloads/{waiting}",
        f"/workloads/{running}/logs", f"/workloads/{running}/logs?contains=line+7", "/workloads/bulk?phase=live",
        "/fleet", "/fleet/east", f"/fleet/east/past?at={_HOUR_AGO}", "/machines/east/east-1/m-00000", "/tenants",
        "/services", f"/services/{service}", "/tables", "/capacity", "/lending",
        "/lending/east/east-3/m-00006", "/health",
    ]  # fmt: skip


async def _add_service(client: httpx.AsyncClient, engine: Engine, rows: ConsoleRows) -> str:
    made = await client.post("/v1/services", json=_SERVICE, headers={"Authorization": f"Bearer {_KEY}"})
    made.raise_for_status()
    service = str(made.json()["id"])
    add_replicas(engine, rows, service, _REPLICAS)
    return service


def _add_logs(engine: Engine, rows: ConsoleRows, folder: Path) -> None:
    """Uploads the log of the first workload that runs to its region's bucket, as an agent does."""
    workload = f"wl-{rows.finished:016d}"
    with transaction(engine) as session:
        session.execute(text("update region set bucket_url = :top || name"), {"top": f"{folder.as_uri()}/"})
        url = session.execute(
            text("select bucket_url from region join workload on region = region.name where id = :id"), {"id": workload}
        ).scalar_one()
    store, offset = open_store(url), 0
    for number in range(_LOG_SEGMENTS):
        body = b"".join(
            b"step %7d: loss 0.1234, line %d of the log of this task, with some text\n" % (number, line)
            for line in range(_SEGMENT_LINES)
        )
        store.put(log_prefix(workload, 1, "trainer", 0) + Segment(offset, 1 + number).name, body)
        offset += len(body)


def _scans(engine: Engine, statements: dict[str, Any]) -> list[str]:
    found = []
    with engine.connect() as connection:
        connection.exec_driver_sql("set statement_timeout = '60s'")
        for statement, given in statements.items():
            if statement.lstrip()[:6].lower() in ("select", "with h", "with r", "with m", "with a"):
                plan = connection.exec_driver_sql(f"explain {statement}", given).scalars().all()
                tables = [name for name in _LARGE if any(f"Seq Scan on {name} " in line for line in plan)]
                if tables:
                    found.append(f"{', '.join(tables)}: {' '.join(statement.split())[:160]}")
    return found


async def _measure(settings: Settings, engine: Engine, rows: ConsoleRows, say: Callable[[str], None]) -> list[Figure]:
    app = create_app(settings)
    watch = _Watch()
    watch.follow(app.state.mizzen.engine)
    shown = {"machines": rows.machines, "waiting": rows.waiting, "finished": rows.finished}
    figures: list[Figure] = []

    def figure(number: int, value: float, absolute: dict[str, float]) -> None:
        figures.append(Figure("console", LINES[number], value, absolute, _ROUNDS, shown))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        await client.post("/console/login", data={"key": _KEY})
        first, update, lists = {}, {}, {}
        _add_logs(engine, rows, settings.data_dir / "buckets")
        for path in _paths(rows, await _add_service(client, engine, rows)):
            say(f"page: {path or '/'}")
            first[path] = await _cost(client, watch, path, {})
            if (table := table_of(path)) is not None:
                lists[path], statement = ratio(engine, table, first[path].body.decode(), list(watch.of_page.items()))
                say(f"list: {lists[path]:.1f} of a plain read: {' '.join(statement.split())[:600]}")
            update[path] = await _cost(client, watch, path, {"HX-Request": "true"})
        scans = _scans(engine, watch.statements)
        for scan in scans:
            say(f"scans {scan}")
        figure(0, max(map(_cpu, first.values())), {path or "/": cost.cpu_ms for path, cost in first.items()})
        for number, costs in ((1, first), (2, update)):
            sizes = {path or "/": len(gzip.compress(cost.body, 6)) / 1000 for path, cost in costs.items()}
            figure(number, max(sizes.values()), sizes)
        maps = {by: await _map_cost(client, watch, f"/fleet/east/map.png?by={by}") for by in ("state", "tenant")}
        maps["past"] = await _map_cost(client, watch, f"/fleet/east/past.png?at={_HOUR_AGO}")
        say("a region of all machines")
        add_wide_region(engine, rows)
        wide = {
            by: await _map_cost(client, watch, f"/fleet/wide/map.png?by={by}") for by in ("state", "tenant", "price")
        }
        for number, made in ((3, maps), (10, wide)):
            figure(number, max(size for size, _ in made.values()), {by: size for by, (size, _) in made.items()})
            figure(number + 1, max(cpu_ms for _, cpu_ms in made.values()), {by: ms for by, (_, ms) in made.items()})
        figure(5, float(len(scans)), {})
        figure(9, max(lists.values()), lists)
    app.state.mizzen.dispose()
    return figures


async def _map_cost(client: httpx.AsyncClient, watch: _Watch, path: str) -> tuple[float, float]:
    """Returns the size of a map in kB, and the CPU time of a new version beyond its queries, in ms."""
    best = float("inf")
    for _ in range(_ROUNDS):
        fleet_pages.PICTURES = RegionMaps()
        watch.queries_s, cpu_s = 0.0, time.process_time()
        answer = await client.get(f"/console{path}", timeout=300)
        best = min(best, (time.process_time() - cpu_s - watch.queries_s) * 1000)
        answer.raise_for_status()
    return len(answer.content) / 1000, best


def measure(rows: ConsoleRows, say: Callable[[str], None]) -> Iterator[Figure]:
    """Yields the figures."""
    with postgres() as url:
        engine = open_engine(url)
        upgrade(engine)
        say("generating rows")
        fill(engine, rows)
        with transaction(engine) as session:
            session.add(ApiKey(id="key-bench", sha256=hash_api_key(_KEY), role="operator"))
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings.model_validate({"database": url, "data_dir": Path(folder)})
            load_master_key(settings.master_key_path, create=True)
            yield from asyncio.run(_measure(settings, engine, rows, say))
            say("open pages")
            yield from _open_pages(settings, engine)
        engine.dispose()


def _open_pages(settings: Settings, engine: Engine) -> Iterator[Figure]:
    with engine.connect() as connection:
        workload, waiting = (
            connection.exec_driver_sql(f"select id from workload where phase = '{phase}' limit 1").scalar_one()
            for phase in ("running", "pending")
        )
    paths = ("/", "/queue", f"/workloads/{workload}", f"/workloads/{waiting}")
    found = shares(engine, settings, _KEY, paths, workload)
    found = {name.replace(workload, "RUNNING").replace(waiting, "WAITING"): value for name, value in found.items()}
    pages = [name for name in found if name.endswith("fetches")]
    for number, name in ((7, "idle"), (8, "busy")):
        mine = {one: value for one, value in found.items() if one.startswith(name)}
        dearest = max(found[page.removesuffix(" fetches")] for page in pages if page.startswith(name))
        yield Figure("console", LINES[number], dearest, mine, 1, {"events_per_s": EVENTS_PER_S, "span_s": SPAN_S})
    one_s, many_s = shared(engine, settings, _KEY, "/queue", _PEOPLE)
    shown = {"one_ms": one_s * 1000, "hundred_ms": many_s * 1000}
    yield Figure("console", LINES[6], many_s / one_s, shown, 1, {"people": _PEOPLE})


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the figures of the suite."""
    yield from measure(ConsoleRows(), bench.say)


SUITE = Suite("console", LINES, run)


@click.command()
@click.option("--machines", type=click.IntRange(min=20), default=ConsoleRows.machines, show_default=True)
@click.option("--waiting", type=click.IntRange(min=1), default=ConsoleRows.waiting, show_default=True)
@click.option("--finished", type=click.IntRange(min=1), default=ConsoleRows.finished, show_default=True)
def main(machines: int, waiting: int, finished: int) -> None:
    """Measures with other sizes, and prints one figure per line as JSON."""
    rows = ConsoleRows(machines, waiting, finished)
    for figure in measure(rows, lambda text: click.echo(f"console: {text}", err=True)):
        click.echo(figure.to_json())


if __name__ == "__main__":
    main()
