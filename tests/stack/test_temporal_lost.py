"""Temporal's state is lost or rolled back by some seconds under a running stack: all workloads end, and none repeats.

The test checks a file to which each task appends its start and its end, with its attempt. MIZZEN_CHAOS_ROUNDS (`make
chaos`) selects the long form.
"""

import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.stack.harness import Up, processes_of, wait_until

SEED = int(os.environ.get("MIZZEN_CHAOS_SEED", "7"))
WHOLE = "MIZZEN_CHAOS_ROUNDS" in os.environ
ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "1"))
WORKLOADS, LONGEST_S = (30, 15.0) if WHOLE else (6, 5.0)
CONFIG = """
scheduler: {scan_interval_s: 5, min_runtime_s: 1, bid_timeout_s: 15}
lifecycle: {heartbeat_timeout_s: 4, node_lost_after_s: 15, collect_interval_s: 1}
reconcile: {interval_s: 1, disagree_s: 3, singletons_s: 1}
tasks: {isolation: none}
trust_tenants: true
"""


class Journal:
    """A folder of files in which tasks write lines `start|end WORKLOAD.RANK ATTEMPT`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def run(self, sleep_s: float) -> str:
        """Returns a script that writes its start and its end; after writing its end, it exits with 0."""
        me = "$MIZZEN_WORKLOAD.$RANK $MIZZEN_ATTEMPT"
        return (
            f'echo "start {me}" >> {self.folder}/$MIZZEN_WORKLOAD.$RANK; sleep {sleep_s}; '
            f'echo "end {me}" >> {self.folder}/$MIZZEN_WORKLOAD.$RANK'
        )

    def lines(self) -> list[list[str]]:
        """Returns all lines that were written."""
        return [line.split() for path in sorted(self.folder.iterdir()) for line in path.read_text().splitlines()]

    def started(self) -> set[str]:
        """Returns the tasks that have started, as `workload.rank`."""
        return {task for word, task, _ in self.lines() if word == "start"}

    def violations(self, tasks: dict[str, int]) -> list[str]:
        """Returns attempts after a successful one, tasks that started twice, and workloads that never succeeded."""
        found = [f"{line}: twice" for line, n in Counter(map(" ".join, self.lines())).items() if n > 1]
        ends: dict[tuple[str, int], set[str]] = defaultdict(set)
        newest: dict[str, int] = defaultdict(int)
        for word, task, attempt in self.lines():
            workload = task.rpartition(".")[0]
            newest[workload] = max(newest[workload], int(attempt))
            if word == "end":
                ends[workload, int(attempt)].add(task)
        for (workload, attempt), ended in sorted(ends.items()):
            if len(ended) == tasks[workload] and newest[workload] > attempt:
                found.append(f"{workload}: attempt {attempt} ended with 0, and attempt {newest[workload]} ran")
        found += [f"{w}: no attempt ended" for w, n in tasks.items() if all(len(ends[w, a]) < n for a in range(1, 99))]
        return found


def _copy(state: Path, to: Path) -> None:
    """Writes a consistent backup of Temporal's database."""
    with sqlite3.connect(state) as source, sqlite3.connect(to) as target:
        source.backup(target)


def _replace_state(up: Up, backup: Path | None) -> None:
    """Kills Temporal and replaces its state with `backup`, or deletes it. The supervisor is stopped meanwhile."""
    assert up.process is not None
    up.process.send_signal(signal.SIGSTOP)
    try:
        (server,) = [pid for pid, command in processes_of(up.data).items() if "start-dev" in command]
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: server not in processes_of(up.data), "Temporal is gone")
        state = up.data / "temporal.db"
        for path in state.parent.glob("temporal.db*"):
            path.unlink()
        if backup is not None:
            shutil.copy(backup, state)
    finally:
        up.process.send_signal(signal.SIGCONT)


def _submit(up: Up, name: str, tasks: int, run: str) -> str:
    job = {"name": "main", "tasks": tasks, "resources": {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"}}
    document = {"version": 1, "name": name, "tenant": "t", "jobs": [{**job, "run": run}]}
    return str(up.client().submit(document)["id"])


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
def test_temporal_forgets_and_nothing_is_repeated(up: Up, tmp_path: Path, seed: int) -> None:
    """All workloads end, including one cancelled just before; gangs that have succeeded do not run again.

    First Temporal is rolled back by some seconds, then it loses its whole state.
    """
    chance = random.Random(seed)
    (up.folder / "config.yaml").write_text(CONFIG)
    up.start()
    up.client().set_tenant("t", 3, {"a100": 16}, None)
    _forgets(up, Journal(tmp_path / "rolled-back"), chance, tmp_path / "backup.db")
    _forgets(up, Journal(tmp_path / "lost"), chance, None)
    assert up.interrupt() == 0
    assert processes_of(up.data) == {}


def _forgets(up: Up, journal: Journal, chance: random.Random, backup: Path | None) -> None:
    """Replaces Temporal's database with `backup`, or deletes it, while workloads start, run, end and are cancelled."""
    tasks: dict[str, int] = {}
    for number in range(WORKLOADS):
        count = chance.choice((1, 1, 2, 4))
        tasks[_submit(up, f"w-{number}", count, journal.run(chance.uniform(1.0, LONGEST_S)))] = count
    waiting = _submit(up, "waiting", 17, "true")  # The gang is larger than the fleet: it is never placed.
    wait_until(lambda: len(journal.started()) >= WORKLOADS, "tasks run")
    if backup is not None:
        _copy(up.data / "temporal.db", backup)
    time.sleep(chance.uniform(1.0, 5.0 if WHOLE else 2.0))
    up.client().cancel(waiting)
    tasks[_submit(up, "late", 1, journal.run(0.5))] = 1
    time.sleep(chance.uniform(0.0, 1.0))
    _replace_state(up, backup)
    for workload in tasks:
        wait_until(lambda workload=workload: up.ended(workload), f"{workload} ends", 240.0)
    wait_until(lambda: up.phase(waiting) == "cancelled", "the cancellation is not forgotten", 120.0)
    assert journal.violations(tasks) == []
