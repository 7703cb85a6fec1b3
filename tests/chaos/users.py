"""Simulated users: they submit, time out and retry, cancel many workloads, change quotas, preempt, drain and cordon."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import httpx

from server.agents import machine_state_dir
from tests.chaos.faults import BLACKOUT_S, now_s
from tests.chaos.observed import Array, Element, Observed, Order, Owned, QueueSample
from tests.chaos.schedule import FLEET_GPUS, LEVELS, REGIONS, Elements, Request, Submission
from tests.stack.harness import ROOT, Up
from tests.stack.idler import idler

_TASK = Path(__file__).with_name("task.py")
_STEP_S = 0.1
_PATIENCE_S = 240.0
"""The time for which a user retries a request during an outage."""
IDLE = "east/idle/a-machine"
"""A lent machine that accepts every request and starts nothing."""
_GPU_TYPE = "a100"
_LARGE = "all-of-"
_UNPLACEABLE = ("held", "machines_avoided", "dependency", "dependency_never", "element_dependency", "array_throttled",
                "array_started", "runners_throttled", "runners_busy")  # fmt: skip
"""Reasons for which a workload may not fit an idle region."""
_ENDED = ("succeeded", "failed", "cancelled")


class Users:
    """All users of one stack, on separate threads. They send raw HTTP requests, without the client's backoff."""

    def __init__(self, up: Up, seed: int, journals: Path, seen: Observed) -> None:
        self._up = up
        self._seed = seed
        self._journals = journals
        self._seen = seen
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(48)
        self._pending: list[Future[None]] = []
        self._owners: dict[str, threading.Lock] = defaultdict(threading.Lock)
        """Held while an owner has a machine or some of its GPUs, because `mizzen lend` lends all of it."""
        key = (up.data / "operator.key").read_text().strip()
        limits = httpx.Limits(max_connections=64)
        api = f"http://127.0.0.1:{up.port}"
        self._metrics = f"{api}/metrics"
        self._http = httpx.Client(base_url=f"{api}/v1", headers={"authorization": f"Bearer {key}"}, limits=limits)
        self.asked: list[str] = []
        """The kind of each completed request."""

    def close_requests(self) -> None:
        """Waits until all requests are completed."""
        for pending in self._pending:
            pending.result()

    def close(self) -> None:
        """Waits for the threads, and closes the connections."""
        self._threads.shutdown()
        self._http.close()

    def make_tenants(self) -> None:
        """Creates all tenants, each with a quota of the whole fleet, and the cluster of the idle machine."""
        key = {"role": "machine", "tenant": None, "label": "", "expires_in_s": None, "machine": IDLE}
        assert self._patiently("POST", "/keys", key).is_success
        for name, level in LEVELS.items():
            assert self._patiently("PUT", f"/tenants/{name}", self._tenant(level, FLEET_GPUS)).is_success

    @staticmethod
    def _tenant(level: int, gpus: int) -> dict[str, Any]:
        return {"level": level, "quota": {"gpus": {"a100": gpus}, "cpus": None}}

    # ------------------------------------------------------------------------------------------------------ submitting

    def submit(self, what: Submission) -> None:
        """Starts a submission on another thread."""
        order = Order(what.name, f"chaos-{self._seed}-{what.name}", what.exit_code, after=what.after, array=what.array)
        order.same_index = what.same_index
        with self._lock:
            self._seen.orders.append(order)
        for _ in range(what.copies):
            self._pending.append(self._threads.submit(self._post, what, order))

    def submit_large(self) -> None:
        """Submits a gang for each region that needs all of its GPUs."""
        for region, gpus in REGIONS.items():
            self.submit(Submission(0.0, f"{_LARGE}{region}", "batch", gpus, 5, 0, 1, (10.0,), (region,)))

    def _document(self, what: Submission) -> dict[str, Any]:
        arguments = f'"{self._journals}" {what.steps} {_STEP_S} {what.exit_code}'
        return {
            "version": 1,
            "name": what.name,
            "tenant": what.tenant,
            "regions": {"allow": list(what.regions)},
            "after": self._after(what),
            "array": what.array and _array(what.array),
            "checkpoint": {"interval": "1s", "grace": "5s"},
            "limits": {"retries": 0 if what.exit_code or (what.array and what.array.at_most_once) else 50},
            # Some may be placed on the idle machine.
            **({"capacity": ["reserved", "voluntary"]} if what.name.endswith(("0", "3", "6", "9")) else {}),
            "jobs": [
                {
                    "name": "count",
                    "tasks": what.tasks,
                    "resources": {"accelerators": "a100:1", "cpus": 0.1, "memory": "256MiB"},
                    "run": f'PYTHONPATH="{ROOT / "sdk"}" exec "$MIZZEN_PYTHON" "{_TASK}" {arguments}',
                }
            ],
        }

    @staticmethod
    def _after(what: Submission) -> list[Any]:
        if what.after is None:
            return []
        name, condition = what.after
        if what.same_index:
            return [{"workload": name, "condition": condition, "same_index": True}]
        return [f"{name}:{condition}"]

    def _post(self, what: Submission, order: Order) -> None:
        give_up_s = time.monotonic() + _PATIENCE_S
        tries = 0
        while time.monotonic() < give_up_s:
            timeout_s = what.timeouts_s[min(tries, len(what.timeouts_s) - 1)]
            tries += 1
            is_early = what.after is not None and not self._is_acknowledged(what.after[0])
            try:
                answer = self._http.post(
                    "/workloads", json=self._document(what), headers={"idempotency-key": order.key}, timeout=timeout_s
                )
            except httpx.HTTPError:
                time.sleep(0.3)
                continue
            if answer.is_success:
                with self._lock:
                    order.ids.add(answer.json()["id"])
                return
            if answer.status_code < 500 and answer.status_code not in (409, 429) and not is_early:
                order.refused = f"{answer.status_code} {answer.text[:300]}"
                return
            time.sleep(0.5)

    def _patiently(self, method: str, path: str, body: Any = None) -> httpx.Response:
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                answer = self._http.request(method, path, json=body, timeout=10.0)
                if answer.status_code < 500 and answer.status_code != 429:
                    return answer
            except httpx.HTTPError:
                pass
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{method} {path}: no response within {_PATIENCE_S:.0f} s")
            time.sleep(0.3)

    # -------------------------------------------------------------------------------------------------- other requests

    def ask(self, what: Request) -> None:
        """Starts a request on another thread."""
        act = {
            "cancel-storm": self._cancel_storm,
            "quota": self._quota,
            "preempt": self._preempt,
            "drain": self._drain,
            "cordon": self._cordon,
            "reclaim": self._reclaim,
            "reclaim-stopped": self._reclaim_stopped,
            "idle-machine": self._idle_machine,
        }
        self._pending.append(self._threads.submit(act[what.kind], what))

    def _is_acknowledged(self, name: str) -> bool:
        with self._lock:
            return any(order.name == name and order.ids for order in self._seen.orders)

    def _acknowledged(self) -> list[tuple[Order, str]]:
        with self._lock:
            return [(order, id_) for order in self._seen.orders for id_ in sorted(order.ids)]

    def _cancel_storm(self, what: Request) -> None:
        """Cancels a quarter of the newest twelve workloads, each with two concurrent requests."""
        give_up_s = time.monotonic() + _PATIENCE_S
        # The newest come first: they are the least likely to have finished.
        while not (newest := [pair for pair in self._acknowledged()[:-13:-1] if pair[0].cancel_sent_s is None]):
            if time.monotonic() > give_up_s:
                return
            time.sleep(0.3)
        for order, id_ in newest[int(what.draw * min(4, len(newest))) :: 4]:
            order.cancel_sent_s = now_s()
            for _ in range(2):
                self._pending.append(self._threads.submit(self._cancel, order, id_))
        self.asked.append(what.kind)

    def _cancel(self, order: Order, id_: str) -> None:
        answer = self._patiently("POST", f"/workloads/{id_}/cancel")
        if answer.is_success and order.cancelled_s is None:
            order.cancelled_s = now_s()

    def _quota(self, what: Request) -> None:
        tenant = list(LEVELS)[int(what.draw * len(LEVELS))]
        self._patiently("PUT", f"/tenants/{tenant}", self._tenant(LEVELS[tenant], int(what.draw * 97) % FLEET_GPUS + 1))
        time.sleep(what.lasts_s)
        self._patiently("PUT", f"/tenants/{tenant}", self._tenant(LEVELS[tenant], FLEET_GPUS))
        self.asked.append(what.kind)

    def _preempt(self, what: Request) -> None:
        answer = self._patiently("GET", "/workloads?phase=running&limit=100")
        running = answer.json()["items"]
        if running:
            chosen = running[int(what.draw * len(running))]
            if chosen["array"] is not None:
                path = f"/workloads?array={chosen['id']}&phase=running&limit=100"
                chosen = next(iter(self._patiently("GET", path).json()["items"]), chosen)
            self._patiently("POST", f"/workloads/{chosen['id']}/preempt")
            self.asked.append(what.kind)

    def _drain(self, what: Request) -> None:
        self._machine(what, "drain", "undrain")

    def _cordon(self, what: Request) -> None:
        self._machine(what, "cordon", "uncordon")

    def _reclaim(self, what: Request) -> None:
        """Takes a machine, or one GPU of it, back at once or with a notice, and lends it again."""
        machines = self._machines()
        if not machines:
            return
        place = what.draw * len(machines)
        machine, how = machines[int(place)], int(place % 1 * 4)
        slots = (int(what.draw * 97) % 2,) if how >= 2 else None  # Each machine has at least two.
        arguments = ["--now"] if how % 2 else ["--notice", "3s"]
        if slots is not None:
            arguments += ["--gpus", str(slots[0])]
        with self._owners[machine]:
            taken_s = now_s()
            is_free = self._owner(machine, "reclaim", *arguments)
            self._keep_and_lend(what, machine, slots, taken_s, now_s() if is_free else None)

    def _keep_and_lend(
        self, what: Request, machine: str, slots: tuple[int, ...] | None, taken_s: float, free_s: float | None
    ) -> None:
        """Lends a machine again after some time. `free_s`: when its owner was told that nothing runs, if at all."""
        if free_s is not None:
            time.sleep(what.lasts_s)
            with self._lock:
                self._seen.owned.append(Owned(machine, slots, taken_s, free_s, now_s()))
        self._owner(machine, "lend")
        self.asked.append(what.kind)

    def _reclaim_stopped(self, what: Request) -> None:
        """Takes a machine back at once while its agent is stopped, and continues the agent afterwards."""
        machines = self._machines()
        if not machines:
            return
        machine = machines[int(what.draw * len(machines))]
        with self._owners[machine], contextlib.suppress(OSError, ValueError, ProcessLookupError):
            pid = json.loads((machine_state_dir(self._up.data, machine) / "agent.json").read_bytes())["pid"]
            began_s = now_s()
            os.kill(pid, signal.SIGSTOP)
            try:
                is_free = self._owner(machine, "reclaim", "--now")
                free_s = now_s()
            finally:
                with contextlib.suppress(ProcessLookupError):  # Killed by a fault meanwhile.
                    os.kill(pid, signal.SIGCONT)
            if free_s - began_s > BLACKOUT_S:
                self._seen.blackouts.append((began_s, free_s + BLACKOUT_S))
            self._keep_and_lend(what, machine, None, began_s, free_s if is_free else None)

    def _idle_machine(self, what: Request) -> None:
        """Runs a lent machine that accepts every request and starts nothing."""
        with idler(self._up.temporal, IDLE, FLEET_GPUS, "a100"):
            time.sleep(2 * what.lasts_s)
        self.asked.append(what.kind)

    def _machines(self) -> list[str]:
        """Returns the ids of the machines of the fleet, sorted."""
        return sorted(m["id"] for m in self._patiently("GET", "/machines").json()["items"] if m["id"] != IDLE)

    def _owner(self, machine: str, *arguments: str) -> bool:
        """Runs a command of a machine's owner, again while the agent is down; returns False if it stays down."""
        socket = machine_state_dir(self._up.data, machine) / "owner.sock"
        command = [str(Path(sys.executable).parent / "mizzen"), *arguments, "--socket", str(socket)]
        give_up_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(command, capture_output=True, timeout=60, check=False)
                if done.returncode == 0:
                    return True
            time.sleep(0.3)
        return False

    def _machine(self, what: Request, on: str, off: str) -> None:
        machines = self._machines()
        if not machines:
            return
        path = f"/machines/{machines[int(what.draw * len(machines))]}"
        self._patiently("POST", f"{path}/{on}", {})
        time.sleep(what.lasts_s)
        self._patiently("POST", f"{path}/{off}")
        self.asked.append(what.kind)

    # ------------------------------------------------------------------------------------------------------- the end

    def wait_for_ends(self, patience_s: float, at_most_s: float) -> None:
        """Waits until all workloads have ended, and records the phase, name and reason of each.

        Stops waiting when no workload has changed for `patience_s`, or after `at_most_s`. There is no shorter limit,
        because the duration of a queue that moves depends on the speed of the machine.
        """
        ends_s, before = time.monotonic() + at_most_s, None
        while True:
            found = self._all()
            self._sample_queue(found)
            self._open_machines()
            live = sorted(
                (w["id"], w["phase"], w["attempt"], str(w["array"])) for w in found if w["phase"] not in _ENDED
            )
            if live != before:
                before, changed_s = live, time.monotonic()
            if not live or time.monotonic() > min(changed_s + patience_s, ends_s):
                break
            time.sleep(1.0)
        for workload in found:
            self._seen.phases[workload["id"]] = workload["phase"]
            self._seen.names[workload["id"]] = workload["name"]
            self._seen.reasons[workload["id"]] = str(workload["reason"])
            if workload["array"] is not None:
                self._seen.arrays[workload["id"]] = self._array(workload)
        # A workload that is missing in the listing may still exist.
        for _, id_ in self._acknowledged():
            if id_ not in self._seen.phases:
                answer = self._patiently("GET", f"/workloads/{id_}")
                if answer.status_code == 200:
                    self._seen.phases[id_] = answer.json()["phase"]

    def _open_machines(self) -> None:
        """As an operator would, opens machines that were cordoned because the faults ended three workloads there."""
        for machine in self._patiently("GET", "/machines").json()["items"]:
            if machine["cordon"] is not None and machine["cordon"]["code"] == "keeps_failing_gangs":
                self._patiently("POST", f"/machines/{machine['id']}/uncordon")
                self.asked.append("open-failing")

    def _array(self, head: dict[str, Any]) -> Array:
        """Returns an array with its elements, in seconds of CLOCK_BOOTTIME."""
        offset_s = now_s() - time.time()

        def at_s(shown: str | None) -> float | None:
            return None if shown is None else datetime.fromisoformat(shown).timestamp() + offset_s

        elements = {}
        for index in range(head["array"]["elements"]):
            path = f"/workloads/{head['id']}-{index}"
            answer, held = self._patiently("GET", path).json(), []
            if answer["attempt"]:
                tries = self._patiently("GET", f"{path}/attempts?limit=500").json()["items"]
                held = [(at_s(one["awarded_at"]) or 0.0, at_s(one["released_at"]) or inf) for one in tries]
            elements[index] = Element(answer["phase"], str(answer["reason"]), tuple(held))
        counts = {phase: head["array"][phase] for phase in _ENDED}
        runners = []
        for number in count():
            answer = self._patiently("GET", f"/workloads/{head['id']}-r{number}/attempts?limit=500")
            if answer.status_code == 404:
                break
            tries = answer.json()["items"]
            runners += [(at_s(one["awarded_at"]) or 0.0, at_s(one["released_at"]) or inf) for one in tries]
        return Array(at_s(head["finished_at"]), counts, elements, tuple(runners))

    def _sample_queue(self, workloads: list[dict[str, Any]]) -> None:
        """Records the queue. All gangs fit a region, and are within their tenants' quotas."""
        queued = [w for w in workloads if w["phase"] == "pending" and w["reason"]["code"] not in _UNPLACEABLE]
        if not queued:
            return
        regions: dict[str, bool] = {}
        for machine in self._patiently("GET", "/machines").json()["items"]:
            if machine["id"] != IDLE and machine["gpu_type"] == _GPU_TYPE:
                takes_work = machine["state"] == "ready" and machine["cordon"] is None and not machine["draining"]
                in_use = machine["slots_held"] or machine["slots_promised"] or machine["slots_withheld"]
                regions[machine["region"]] = regions.get(machine["region"], True) and takes_work and not in_use
        metrics = self._patiently("GET", self._metrics).text
        scans = re.search(r'^mizzen_auction_total\{what="scans"\} (\S+)', metrics, re.MULTILINE)
        self._seen.samples.append(
            QueueSample(
                int(float(scans[1])) if scans else 0,
                frozenset((w["id"], r) for r, idle in regions.items() if idle for w in queued if self._allows(w, r)),
            )
        )

    @staticmethod
    def _allows(workload: dict[str, Any], region: str) -> bool:
        """Returns whether a workload may run in a region, from its name (`submit_large`)."""
        return workload["name"] == _LARGE + region or not workload["name"].startswith(_LARGE)

    def _all(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = self._patiently("GET", f"/workloads?limit=500{cursor}").json()
            out += page["items"]
            if not page.get("next_cursor"):
                return out
            cursor = f"&cursor={page['next_cursor']}"

    def save_events(self, path: Path) -> None:
        """Writes all events to a file, which helps to find the cause of a violation."""
        with self._http.stream("GET", "/events?follow=false", timeout=60.0) as answer, path.open("wb") as file:
            for block in answer.iter_bytes():
                file.write(block)

    def withheld_machines(self, timeout_s: float) -> list[str]:
        """Waits until all machines are ready, uncordoned, not draining and without slots held.

        Returns descriptions of the machines for which this was not so after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            machines = self._patiently("GET", "/machines").json()["items"]
            bad = [m for m in machines if m["id"] != IDLE]
            bad = [m for m in bad if m["state"] != "ready" or m["cordon"] is not None or m["draining"]]
            # If a workload did not end, that is already a violation, and the slots that it holds are no second one.
            held = [] if self._seen.live else [m for m in machines if m["slots_held"] or m["slots_promised"]]
            if not (bad or held) or time.monotonic() > deadline_s:
                out = [f"{m['id']}: {m['state']}, cordon {m['cordon']}, draining {m['draining']}" for m in bad]
                return out + [f"{m['id']}: slots held {m['slots_held']}, promised {m['slots_promised']}" for m in held]
            time.sleep(1.0)


def _array(elements: Elements) -> dict[str, Any]:
    runners = {"interrupt": elements.interrupt, "at_most_once": elements.at_most_once}
    return {
        "indexes": f"0-{elements.number - 1}",
        "throttle": elements.throttle,
        **({} if elements.interrupt is None else {"runners": runners}),
    }
