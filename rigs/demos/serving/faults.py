"""Replicas that fail while their probe succeeds, an update, and scaling to zero and back, under a constant load.

    python -m rigs.demos.serving.faults [SECONDS [REQUESTS_PER_S [ROUNDS]]]

Four replicas on machines of the installation get a constant load. One answers 500, one hangs, one takes three seconds
for each answer, and then the service is updated. A request fails if it has no complete right answer within ten times
the median of its kind (single answers, and streams). After the load, the service is scaled to zero again and again, and
each time some requests are sent at once, which the balancer holds until a replica is ready.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import yaml

from infra.stack.ports import free_port
from rigs.demos.serving.installation import Balancer
from rigs.demos.serving.load import Request
from tests.stack.harness import ROOT, Up, wait_until

_NAME = "chat"
_REPLICAS = 4
_FAILED_BAR, _WAKE_BAR_S = 0.001, 4.0
_TIMES_MEDIAN = 10.0
_HELD = 20
"""The requests that are sent at once while the service is scaled to zero."""
_FLEET = f"""
version: 1
regions:
  - name: west
    clusters:
      - name: a
        machines: [{{name: m, count: 2, cpus: 8, memory: 4GiB, owner: "{os.getuid()}"}}]
"""
_SERVER = ROOT / "examples" / "serving" / "server.py"
_FAULTY = Path(__file__).with_name("faulty_server.py")
Say = Callable[[str], None]


def _document(policy: dict[str, Any], loading_s: float = 0.0) -> dict[str, Any]:
    return {
        "version": 1,
        "name": _NAME,
        "tenant": "t",
        "service": {
            "readiness_probe": {"path": "/health", "initial_delay_seconds": 60, "interval_seconds": 1},
            "replica_policy": policy,
            "drain_seconds": 10,
        },
        "resources": {"cpus": 0.5, "memory": "128MiB"},
        "env": {"LOADING_S": str(loading_s)},
        "files": {"example_server.py": _SERVER.read_text(), "server.py": _FAULTY.read_text()},
        "run": 'exec "$MIZZEN_PYTHON" server.py',
    }


class FaultsScenario:
    """Runs the load with its faults, and the rounds from zero."""

    def __init__(self, folder: Path, up: Up, seconds: float, per_s: float, say: Say) -> None:
        self._folder, self._up, self._seconds, self._per_s, self._say = folder, up, seconds, per_s, say
        self._client = up.client()
        self._sick: set[int] = set()
        self.events: list[tuple[float, str]] = []
        """When each fault and the update began, in seconds since the epoch."""

    def run(self, rounds: int) -> tuple[list[Request], list[float], int]:
        """Returns the requests of the load, and the times to the first byte and the failures from zero."""
        self._client.set_tenant("t", 3, {}, 100)
        self._client.create_service(_document({"min_replicas": _REPLICAS}))
        key = (self._up.data / "operator.key").read_text().strip()
        balancer = Balancer(self._folder, self._client.url, key, (_NAME,))
        balancer.start()
        try:
            self._url = f"http://127.0.0.1:{balancer.ports[_NAME]}"
            wait_until(lambda: self._ready() == _REPLICAS, "the service is ready")
            wait_until(lambda: httpx.get(f"{self._url}/health", trust_env=False).is_success, "the balancer answers")
            self._say("the service is ready; the load begins")
            return self._load(), *self._from_zero(rounds)
        finally:
            balancer.close()
            for line in (self._folder / "balance.log").read_text().splitlines():
                if " is ejected " in line or " is admitted " in line:
                    self._say(f"the balancer: {line}")

    def _ready(self) -> int:
        return int(sum(self._client.service(_NAME)["ready"].values()))

    def _load(self) -> list[Request]:
        file, began_s = self._folder / "requests.jsonl", time.time()
        command = [sys.executable, "-m", "rigs.demos.serving.load", self._url, str(self._per_s), str(self._seconds)]
        faults = ((0.1, "error"), (0.3, "hang"), (0.5, "slow"))
        with subprocess.Popen([*command, str(file)], cwd=ROOT) as load:
            try:
                for share, fault in faults:
                    time.sleep(max(0.0, began_s + share * self._seconds - time.time()))
                    self._break(fault)
                time.sleep(max(0.0, began_s + 0.75 * self._seconds - time.time()))
                self.events.append((time.time(), "update"))
                self._client.update_service(_NAME, _document({"min_replicas": _REPLICAS}, 1.0))
                self._say("the service is updated")
                assert load.wait(self._seconds + 120) == 0
            finally:
                load.kill()
        return [Request(**json.loads(line)) for line in file.read_text().splitlines()]

    def _break(self, fault: str) -> None:
        """Breaks a replica that has not been broken before."""
        found = [one for one in self._client.endpoints(_NAME)["endpoints"] if one["replica"] not in self._sick]
        one = found[0]
        self._sick.add(one["replica"])
        self.events.append((time.time(), fault))
        httpx.post(f"http://{one['address']}:{one['port']}/fault/{fault}", trust_env=False).raise_for_status()
        self._say(f"replica {one['replica']}: {fault}")

    def _from_zero(self, rounds: int) -> tuple[list[float], int]:
        policy = {
            "min_replicas": 0, "max_replicas": _REPLICAS, "target_qps_per_replica": 100, "downscale_delay_seconds": 1,
        }  # fmt: skip
        self._client.update_service(_NAME, _document(policy, 1.0))
        times_s: list[float] = []
        failed = 0
        for number in range(rounds):
            wait_until(self._is_at_zero, "the service is scaled to zero", 180)
            found = asyncio.run(_at_once(self._url))
            times_s += [one for one in found if one is not None]
            failed += found.count(None)
            self._say(f"round {number + 1} from zero: {max(times_s[-_HELD:], default=0):.1f} s, {failed} failed")
        return times_s, failed

    def _is_at_zero(self) -> bool:
        service = self._client.service(_NAME)
        gone = all(one["stage"] == "ended" for one in service["replicas"])
        return bool(service["state"] == "scaled_to_zero" and gone and not self._client.endpoints(_NAME)["endpoints"])


async def _at_once(url: str) -> list[float | None]:
    """Sends requests concurrently; returns the time to the first byte of each. None: no complete correct answer."""

    async def one(client: httpx.AsyncClient) -> float | None:
        began_s = time.monotonic()
        try:
            async with client.stream("GET", f"{url}/generate", params={"tokens": 20}) as answer:
                first_s, text = time.monotonic() - began_s, await answer.aread()
            return first_s if answer.status_code == 200 and b"[DONE]" in text else None
        except httpx.HTTPError:
            return None

    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        return list(await asyncio.gather(*(one(client) for _ in range(_HELD))))


def alone_s() -> float:
    """Returns how long the server takes without mizzen, from the start of its process to its first good probe."""
    port, began_s = free_port(), time.monotonic()
    environ = {**os.environ, "MIZZEN_PORT": str(port), "LOADING_S": "1"}
    with subprocess.Popen([sys.executable, str(_SERVER)], env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success, "it answers")
            return time.monotonic() - began_s
        finally:
            process.kill()


def failures(requests: list[Request]) -> list[Request]:
    """Returns the requests without a complete correct answer within ten times the median of their kind."""
    found: list[Request] = []
    for is_stream in (False, True):
        kind = [one for one in requests if (one.number % 10 == 0) == is_stream]
        limit_s = _TIMES_MEDIAN * median(one.ended_s - one.began_s for one in kind)
        found += [one for one in kind if one.outcome != "ok" or one.ended_s - one.began_s > limit_s]
    return found


def by_event(requests: list[Request], events: list[tuple[float, str]]) -> dict[str, list[Request]]:
    """Returns the requests by the newest event before their start."""
    found: dict[str, list[Request]] = {}
    for one in requests:
        before = [name for at_s, name in events if at_s <= one.began_s]
        found.setdefault(before[-1] if before else "the start", []).append(one)
    return found


def main() -> int:
    """Runs the scenario and prints its figures; returns 1 if one misses its bar."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", flush=True)

    given = [float(text) for text in sys.argv[1:4]]
    seconds, per_s, rounds = [*given, *(600.0, 35.0, 10.0)[len(given) :]]
    with tempfile.TemporaryDirectory() as folder:
        up = Up(Path(folder), _FLEET, settings=yaml.safe_dump({"services": {"scaling_interval_s": 1}}))
        try:
            up.start()
            scenario = FaultsScenario(Path(folder), up, seconds, per_s, say)
            requests, times_s, held_failed = scenario.run(int(rounds))
        finally:
            up.close()
    bad, own_s = failures(requests), alone_s()
    p99_s = sorted(times_s)[int(0.99 * (len(times_s) - 1))] if times_s else float("inf")
    share = len(bad) / len(requests)
    late = sum(one.outcome == "ok" for one in bad)
    print(f"requests                          {len(requests):,}")
    print(f"failed                            {len(bad)} ({100 * share:.3f} %; at most {100 * _FAILED_BAR:g} %)")
    print(f"  of them complete, but too late  {late}")
    for event, those in by_event(bad, scenario.events).items():
        errors = ", ".join(sorted({one.error for one in those if one.error}))
        print(f"  began after {event:<20} {len(those)}{': ' if errors else ''}{errors}")
    print(f"held requests that failed         {held_failed} of {held_failed + len(times_s)}")
    print(f"first byte from zero, P99         {p99_s:.1f} s; the process alone: {own_s:.1f} s; at most 4 s more")
    return int(share > _FAILED_BAR or held_failed > 0 or p99_s > own_s + _WAKE_BAR_S)


if __name__ == "__main__":
    sys.exit(main())
