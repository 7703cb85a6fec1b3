"""Runs the demo: starts the stack, submits gangs, injects faults, waits, checks the results and writes the report."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from agent.fleet import end_machine, power_off
from infra import children
from infra.config.services import ApiSettings
from infra.config.settings import Settings
from infra.errors import MizzenError
from infra.process_exit import stop_signals
from infra.stack.embedded import EmbeddedStack
from infra.stack.fork_server import ForkServer
from infra.stack.lock import NEW_FOLDER, data_folder
from infra.stack.ports import free_port
from infra.stack.supervisor import Child
from mizzen_client import Client
from mizzen_client.cli.formats import plural
from server.agents import fleet_isolation, machine_state_dir
from server.demo import checks, facts, report, scenario
from server.demo.watch import EventPrinter

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "digits"
_PATIENCE_S = 300.0
T = TypeVar("T")


class DemoFailed(MizzenError):
    """An expected event of the demo did not happen in time."""


def _settings(data_dir: Path) -> Settings:
    return Settings(
        data_dir=data_dir,
        api=ApiSettings(port=free_port()),
        trust_tenants=True,  # The demo has three, which are all its own, and runs where they cannot be separated, too.
        scheduler=scenario.SCHEDULER,
        lifecycle=scenario.LIFECYCLE,
    )


class _Console(Console):
    """A console that sets `stop` when nothing reads its output any more."""

    def __init__(self, stop: asyncio.Event) -> None:
        super().__init__(highlight=False)
        self._stop = stop

    def on_broken_pipe(self) -> None:
        """Called by `Console` when its output is closed."""
        with contextlib.suppress(SystemExit):  # The exit would end the event loop and leave the stack running.
            super().on_broken_pipe()
        self._stop.set()


async def run_demo(data_dir: Path, forks: ForkServer, *, keep: bool, plain: bool) -> int:
    """Runs the whole demo; returns 0 if all checks passed.

    Raises:
        MizzenError: the stack did not start, or an expected event did not happen in time.
    """
    stop = asyncio.Event()
    console = _Console(stop)
    with data_folder(data_dir) as folder:
        _clear(folder)
        settings = _settings(folder)
        isolation = fleet_isolation(settings, scenario.FLEET, folder)
        console.print(f"isolation of tasks: {isolation}", style="dim")
        stack = EmbeddedStack(
            settings,
            scenario.FLEET,
            folder,
            lambda line: console.print(line, style="dim"),
            why_shared=isolation.why_shared,
            forks=forks,
        )
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, stop.set)
        work = asyncio.create_task(_Demo(stack, console, live=console.is_terminal and not plain).run())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        hurry = asyncio.Event()
        try:
            if not work.done():
                work.cancel()
                console.print("interrupted: stopping the stack", style="yellow")
                hurry.set()
            stopped.cancel()
            outcome = (await asyncio.gather(work, return_exceptions=True))[0]
        finally:
            await stack.stop(hurry=hurry)
            if hurry.is_set():  # No later run continues the tasks that the stack has left.
                await asyncio.to_thread(_end_machines, folder)
        if isinstance(outcome, asyncio.CancelledError):
            return 130
        if isinstance(outcome, BaseException):
            raise outcome
        code = _summary(console, folder, *outcome)
    if not keep and code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _clear(folder: Path) -> None:
    """Empties the folder of an earlier demo. Folders that were not created by a demo are not touched.

    Raises:
        DemoFailed: the folder contains other files.
    """
    mark = folder / ".mizzen-demo"
    others = [p.name for p in folder.iterdir() if p.name not in (*NEW_FOLDER, mark.name)]
    if others and not mark.exists():
        shown = ", ".join(sorted(others)[:3])
        raise DemoFailed(f"data_dir: {folder} contains {shown} and was not created by a demo; choose another folder")
    mark.touch()
    _end_machines(folder)  # They are left from a demo that was killed.
    for name in others:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _end_machines(folder: Path) -> None:
    """Kills the tasks that an earlier demo left running, and removes the state of its machines."""
    for machine in (folder / "machines").glob("*"):
        end_machine(machine)


def _summary(console: Console, folder: Path, found: facts.Facts, held: list[checks.Check], took_s: float) -> int:
    path = folder / "report.html"
    path.write_text(report.render(found, held))
    console.print()
    for check in held:
        style = "green" if check.passed else "bold red"
        console.print(
            f"{'holds' if check.passed else 'FAILS'}  {check.name}: {check.found}", style=style, soft_wrap=True
        )
    good = all(check.passed for check in held)
    attempts = len(found.attempts)
    console.print(
        f"\n{len(found.workloads)} workloads, {attempts} attempts in {took_s:.0f} s:"
        f" {'everything holds' if good else 'NOT everything holds'}",
        style="bold green" if good else "bold red",
    )
    console.print(f"report: {path}", soft_wrap=True)
    return 0 if good else 1


class _Demo:
    def __init__(self, stack: EmbeddedStack, console: Console, *, live: bool) -> None:
        self._stack = stack
        self._console = console
        self._live = live
        self._ids: dict[str, str] = {}

    async def run(self) -> tuple[facts.Facts, list[checks.Check], float]:
        started = time.monotonic()
        await self._stack.start()
        self._console.print(f"API docs: {self._stack.api_url}/docs   Temporal UI: {self._stack.ui_url}", style="bold")
        self._client = Client(self._stack.api_url, self._stack.operator_key)
        self._watch = EventPrinter(self._client, self._console, live=self._live)
        watching = asyncio.create_task(self._watch.run())
        try:
            await self._prepare()
            await self._story()
            await self._until(self._all_done, "all workloads end")
            await self._watch.catch_up()
            self._watch.say("repeating all trainings without interruption, to compare the weights", "dim")
            found = await asyncio.to_thread(facts.read_facts, self._client, time.time())
            held = [checks.all_succeeded(found), await self._weights(found), checks.slots_held_once(found)]
            held += [checks.redone_work(found)]
            held += checks.happened(found, self._ids["frontier"], self._ids["radiology"], "scans")
            held += [self._worker_killed]
            return found, held, time.monotonic() - started
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._client.close()

    # -------------------------------------------------------------------------------------------------------- the story

    async def _prepare(self) -> None:
        for name, (level, gpus) in scenario.TENANTS.items():
            await asyncio.to_thread(self._client.set_tenant, name, level, gpus, None)
        for table, (home, others) in scenario.TABLES.items():
            folder = self._bucket(home) / "tables" / table
            folder.mkdir(parents=True)
            make = await asyncio.create_subprocess_exec(
                *children.python(str(EXAMPLE / "make_table.py"), str(folder)),
                env=children.environment(),
                stdout=asyncio.subprocess.DEVNULL,
            )
            if await make.wait() != 0:
                raise DemoFailed(f"make_table.py could not write {folder}")
            await asyncio.to_thread(self._client.add_table, table, home)
            for region in others:
                await asyncio.to_thread(self._client.replicate_table, table, region)
        await self._until(self._fleet_ready, "all machines register")
        await self._until(self._tables_ready, "the tables' replicas are complete")

    async def _story(self) -> None:
        self._watch.say("six gangs fill the fleet")
        for gang in scenario.FIRST:
            await self._submit(gang)
        await self._until(self._first_run, "the first gangs run and save")
        self._watch.say("five more gangs are submitted; two need h100, whose region does not have their table")
        for gang in (*scenario.THEN, scenario.FAR_DATA, scenario.OVER_QUOTA):
            await self._submit(gang)
        self._watch.say("an urgent workload is submitted: it needs two whole machines, and none is free")
        await self._submit(scenario.URGENT)
        await self._until(lambda: self._phase_is("frontier", "running"), "the urgent workload runs")
        await self._until(self._moved, "an evicted workload resumes in another region")
        control = self._worker
        assert control.process is not None
        self._watch.say(f"SIGKILL to mizzen's worker (process {control.process.pid})", "bold red")
        before = control.restarts
        control.process.send_signal(signal.SIGKILL)
        await self._until(lambda: self._restarted(before), "the worker is back")
        machine = await self._until_found(
            self._doomed_machine, "a gang that has saved runs on the machine that will fail"
        )
        self._watch.say(f"machine {machine} loses power, without notice", "bold red")
        await asyncio.to_thread(power_off, machine_state_dir(self._stack.data_dir, machine))

    async def _submit(self, gang: scenario.DemoWorkload) -> None:
        done = await asyncio.to_thread(self._client.submit, gang.document(), EXAMPLE)
        self._ids[gang.name] = done["id"]

    async def _weights(self, found: facts.Facts) -> checks.Check:
        buckets = {r.name: self._bucket(r.name) for r in scenario.FLEET.regions}
        scratch = self._stack.data_dir / "uninterrupted"
        return await checks.same_weights(found, scenario.ALL, buckets, EXAMPLE, scratch)

    def _bucket(self, region: str) -> Path:
        return self._stack.data_dir / "buckets" / region

    # ------------------------------------------------------------------------------------------------------ conditions

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        await self._until_found(lambda: condition() or None, what)

    async def _until_found(self, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                found = await asyncio.to_thread(look)
                is_over = found is None and await asyncio.to_thread(self._is_over)
            except Exception:
                found, is_over = None, False
                if time.monotonic() > deadline:
                    raise
            if found is not None:
                return found
            if is_over:
                load, cpus = os.getloadavg()[0], os.cpu_count()
                raise DemoFailed(
                    f"waited until {what}, but all workloads ended before: the machine is too busy for the demo (load"
                    f" {load:.0f} on {plural(cpus or 1, 'CPU')}); run it again when the load is lower"
                )
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {_PATIENCE_S:.0f} s until {what}; see {self._stack.data_dir / 'run' / 'log'}")
            await asyncio.sleep(0.2)

    def _is_over(self) -> bool:
        """Returns whether all workloads were submitted and have ended, so that nothing more can happen."""
        return len(self._ids) == len(scenario.ALL) and self._all_done()

    def _fleet_ready(self) -> bool:
        ready = [m for m in self._client.machines() if m["state"] == "ready"]
        return len(ready) == len(scenario.FLEET.machines())

    def _tables_ready(self) -> bool:
        return all(r["state"] == "ready" for t in self._client.tables() for r in t["replicas"])

    def _phase_is(self, name: str, phase: str) -> bool:
        return str(self._client.workload(self._ids[name])["phase"]) == phase

    def _first_run(self) -> bool:
        ids = [self._ids[g.name] for g in scenario.FIRST]
        return all(any(a["checkpoint_step"] is not None for a in self._client.attempts(id_)) for id_ in ids)

    def _moved(self) -> bool:
        """Returns whether a stopped workload runs again in another region."""
        return any(
            later["region"] != before["region"] and later["last_step"] is not None
            for workload in self._ids.values()
            for before, later in pairwise(sorted(self._client.attempts(workload), key=lambda a: a["attempt"]))
        )

    @property
    def _worker(self) -> Child:
        return next(c for c in self._stack.supervisor.children if c.name == "worker")

    def _restarted(self, before: int) -> bool:
        child = self._worker
        return child.restarts > before and child.process is not None and child.process.poll() is None

    def _doomed_machine(self) -> str | None:
        """Returns a machine that runs `dictation`, after `dictation` has saved a checkpoint; None: not yet."""
        id_ = self._ids["dictation"]
        saved = {a["attempt"] for a in self._client.attempts(id_) if a["checkpoint_step"] is not None}
        held = (a for a in self._client.allocations(id_) if a["released_at"] is None and a["attempt"] in saved)
        return min((a["machine"] for a in held), default=None) if self._phase_is("dictation", "running") else None

    def _all_done(self) -> bool:
        return not list(self._client.workloads(phases=("live",)))

    @property
    def _worker_killed(self) -> checks.Check:
        child = self._worker
        name = "mizzen's worker was killed and restarted"
        return checks.Check(name, child.restarts > 0, f"restarted {plural(child.restarts, 'time')}")
