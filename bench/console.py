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
from pathlib import Path
from typing import Any

import click
import httpx
from sqlalchemy import Engine, event

from bench.console_open_page import EVENTS_PER_S, SPAN_S, shares
from bench.console_rows import ConsoleRows, fill
from bench.harness import Bench, Figure, Line, Suite
from bench.postgres import postgres
from console import fleet_pages
from console.application import create_app
from console.fleet_picture import RegionMaps
from infra.config.settings import Settings
from infra.db.migrate import upgrade
from infra.db.session import open_engine, transaction
from infra.db.tenants import ApiKey
from infra.keys import hash_api_key, load_master_key

LINES = (
    Line("CPU of the dearest page beyond its queries, in ms", 20.0),
    Line("largest first page, gzipped, in kB", 60.0),
    Line("largest update, gzipped, in kB", 10.0),
    Line("largest map, in kB", 60.0),
    Line("CPU of a new version of a map beyond its queries, in ms", 40.0),
    Line("statements of lists that scan a large table", 0.0),
    Line("100 pages of ten people after a change, of one page", 3.0),
    Line("open page when nothing happens, in % of a core", 0.5),
    Line("open page with 100 events a second, in % of a core", 5.0),
)
_ROUNDS = 5
_LARGE = ("workload", "attempt", "allocation", "event")
_KEY = "mzn_bench"
_PEOPLE = 10
"""Browsers. Of the ten tabs of each, the one that is shown asks for its part; the others wait until they are shown."""


@dataclass
class _Watch:
    """The SQL statements of requests, and the CPU time of the threads that execute them."""

    queries_s: float = 0.0
    began_s: dict[int, float] = field(default_factory=dict)
    statements: dict[str, Any] = field(default_factory=dict)

    def follow(self, engine: Engine) -> None:
        """Watches an engine."""

        @event.listens_for(engine, "before_cursor_execute")
        def before(_c: Any, cursor: Any, statement: str, given: Any, _x: Any, _m: Any) -> None:
            self.statements.setdefault(statement, given)
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
    for _ in range(_ROUNDS):
        watch.queries_s, cpu_s = 0.0, time.process_time()
        answer = await client.get(f"/console{path}", headers=headers, timeout=300)
        cpu_ms = (time.process_time() - cpu_s - watch.queries_s) * 1000
        answer.raise_for_status()
        best = min(best, _PageCost(cpu_ms, answer.content), key=_cpu)
    return best


def _cpu(cost: _PageCost) -> float:
    return cost.cpu_ms


def _paths(rows: ConsoleRows) -> list[str]:
    running, waiting = (f"wl-{number:016d}" for number in (rows.finished, rows.finished + rows.machines * 9 // 10))
    return [
        "", "/queue", f"/queue?after={rows.waiting // 2}", "/workloads", "/workloads?phase=live&tenant=vision",
        "/workloads?phase=failed", "/workloads?label=team%3Dspeech", f"/workloads/{running}", f"/workloads/{waiting}",
        "/workloads/bulk?phase=live", "/fleet", "/fleet/east", "/tenants", "/services", "/tables", "/capacity",
        "/lending", "/health",
    ]  # fmt: skip


def _scans(engine: Engine, statements: dict[str, Any]) -> list[str]:
    found = []
    with engine.connect() as connection:
        connection.exec_driver_sql("set statement_timeout = '60s'")
        for statement, given in statements.items():
            if statement.lstrip()[:6].lower() in ("select", "with h", "with r"):
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
        first, update = {}, {}
        for path in _paths(rows):
            say(f"page: {path or '/'}")
            first[path] = await _cost(client, watch, path, {})
            update[path] = await _cost(client, watch, path, {"HX-Request": "true"})
        scans = _scans(engine, watch.statements)
        for scan in scans:
            say(f"scans {scan}")
        figure(0, max(map(_cpu, first.values())), {path or "/": cost.cpu_ms for path, cost in first.items()})
        for number, costs in ((1, first), (2, update)):
            sizes = {path or "/": len(gzip.compress(cost.body, 6)) / 1000 for path, cost in costs.items()}
            figure(number, max(sizes.values()), sizes)
        maps, cpu_ms = {}, {}
        for by in ("state", "tenant"):
            best = float("inf")
            for _ in range(_ROUNDS):
                fleet_pages.PICTURES = RegionMaps()
                watch.queries_s, cpu_s = 0.0, time.process_time()
                answer = await client.get(f"/console/fleet/east/map.png?by={by}", timeout=300)
                best = min(best, (time.process_time() - cpu_s - watch.queries_s) * 1000)
            maps[by], cpu_ms[by] = len(answer.content) / 1000, best
        figure(3, max(maps.values()), maps)
        figure(4, max(cpu_ms.values()), cpu_ms)
        figure(5, float(len(scans)), {})
        headers = {"HX-Request": "true"}

        async def cpu_of(pages: int) -> float:
            cpu_s = time.process_time()
            await asyncio.gather(*(client.get("/console/queue", headers=headers, timeout=300) for _ in range(pages)))
            return time.process_time() - cpu_s

        one = min([await cpu_of(1) for _ in range(_ROUNDS)])
        many = min([await cpu_of(_PEOPLE) for _ in range(_ROUNDS)])
        figure(6, many / one, {"one_ms": one * 1000, "hundred_ms": many * 1000})
    app.state.mizzen.dispose()
    return figures


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
        workload = connection.exec_driver_sql("select id from workload where phase = 'running' limit 1").scalar_one()
    found = shares(engine, settings, _KEY, ("/", "/queue", f"/workloads/{workload}"), workload)
    found = {name.replace(workload, "ID"): value for name, value in found.items()}
    pages = [name for name in found if name.endswith("fetches")]
    for number, name in ((7, "idle"), (8, "busy")):
        mine = {one: value for one, value in found.items() if one.startswith(name)}
        dearest = max(found[page.removesuffix(" fetches")] for page in pages if page.startswith(name))
        yield Figure("console", LINES[number], dearest, mine, 1, {"events_per_s": EVENTS_PER_S, "span_s": SPAN_S})


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
