"""Gangs that run while faults happen, and what is seen of them from outside: their tasks' journals."""

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

from mizzen_client.errors import ClientError
from tests.chaos.observed import Observed, Order, read_journals
from tests.stack.harness import ROOT, Up, wait_until

_TASK = ROOT / "tests" / "chaos" / "task.py"
_ENDED = ("succeeded", "failed", "cancelled")
_STEP_S = 0.1


class Load:
    """A user who keeps some gangs of one to three tasks in the queue, each of some seconds."""

    def __init__(self, up: Up, journals: Path, seen: Observed, seed: int, gangs: int) -> None:
        """`gangs`: how many have not ended, at each time."""
        self._up, self._journals, self._seen, self._gangs = up, journals, seen, gangs
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        journals.mkdir()

    def start(self) -> None:
        """Begins to submit."""
        self._thread.start()

    def stop(self) -> None:
        """Submits nothing more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            with contextlib.suppress(ClientError, OSError):
                if sum(one["finished_at"] is None for one in self._up.client().workloads()) < self._gangs:
                    self._submit()

    def _submit(self) -> None:
        order = Order(name := f"gang-{len(self._seen.orders)}", f"key-{name}", 0)
        steps, tasks = self._chance.randint(20, 80), self._chance.choice((1, 1, 2, 3))
        self._seen.orders.append(order)
        run = f'PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON" "{_TASK}" "{self._journals}" {steps} {_STEP_S} 0'
        resources = {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"}
        document = {
            "version": 1, "name": name, "tenant": "t", "checkpoint": {"interval": "1s", "grace": "4s"},
            "limits": {"retries": 50}, "jobs": [{"name": "count", "tasks": tasks, "resources": resources, "run": run}],
        }  # fmt: skip
        while not order.ids and not self._stop.is_set():
            with contextlib.suppress(ClientError, OSError):
                order.ids.add(str(self._up.client().submit(document, idempotency_key=order.key)["id"]))

    def finish(self, timeout_s: float) -> None:
        """Waits until all workloads have ended, and records their ends and the journals.

        A submission that was never acknowledged may exist or not.
        """

        def all_() -> list[dict[str, Any]]:
            return list(self._up.client().workloads())  # type: ignore[arg-type]

        with contextlib.suppress(AssertionError):  # The judge names those that did not end.
            wait_until(lambda: all(one["phase"] in _ENDED for one in all_()), "all workloads have ended", timeout_s)
        seen, found = self._seen, all_()
        seen.phases = {one["id"]: one["phase"] for one in found}
        seen.names = {one["id"]: one["name"] for one in found}
        seen.reasons = {one["id"]: str(one["reason"]) for one in found}
        seen.orders = [order for order in seen.orders if order.ids or order.name in seen.names.values()]
        seen.runs = read_journals(self._journals)
