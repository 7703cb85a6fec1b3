"""The scenario: a constant load, while machines, replicas and processes are killed one after the other."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from rigs.demos.serving.installation import Balancer, Installation
from rigs.demos.serving.outcome import Outcome, read_outcome
from tests.stack.harness import ROOT, wait_until

SPOT, ON_DEMAND = "chat", "chat-on-demand"
_EXAMPLE = ROOT / "examples" / "serving"
_SAMPLE_S = 0.5
Say = Callable[[str], None]


@dataclass
class Sample:
    """The state of a service, as the API showed it."""

    at_s: float
    ready: dict[str, int]
    """Ready replicas by kind and zone."""
    target: int
    usd: float


@dataclass
class Course:
    """The events of a run. Times are seconds since the epoch."""

    began_s: float = 0.0
    ended_s: float = 0.0
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {SPOT: [], ON_DEMAND: []})
    events: list[tuple[float, str]] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    """When the balancer, or its HAProxy, was killed."""
    preemptions: int = 0
    outcome: Outcome | None = None

    def availability(self, service: str) -> float:
        """Returns the share of the samples during the load with at least the target of ready replicas."""
        own = [one for one in self.samples[service] if self.began_s <= one.at_s <= self.ended_s]
        return sum(sum(one.ready.values()) >= one.target for one in own) / len(own)

    def usd(self, service: str) -> float:
        """Returns the cost of a service's machines during the load."""
        own = [one.usd for one in self.samples[service] if self.began_s <= one.at_s <= self.ended_s]
        return own[-1] - own[0]


def document(name: str, target: int, placer: str | None) -> dict[str, Any]:
    """Returns the document of the example service with `target` replicas. `placer` None: on-demand machines only."""
    policy: dict[str, Any] = {"min_replicas": target}
    if placer is not None:
        policy |= {"spot_placer": placer, "num_overprovision": 1, "dynamic_ondemand_fallback": True}
    else:
        policy |= {"spot_placer": "spothedge", "base_ondemand_fallback_replicas": target}
    return {
        "version": 1,
        "name": name,
        "tenant": "t",
        "service": {
            "readiness_probe": {"path": "/health", "initial_delay_seconds": 60},
            "replica_policy": policy,
            "drain_seconds": 5,
        },
        "resources": {
            "accelerators": "a100:1", "cpus": 0.5, "memory": "128MiB", "ports": 8000, "use_spot": True,
        },
        "files": {"server.py": (_EXAMPLE / "server.py").read_text()},
        "run": 'exec "$MIZZEN_PYTHON" server.py',
    }  # fmt: skip


class ServingDemoScenario:
    """Runs the load and the disturbances."""

    def __init__(self, site: Installation, seconds: float, per_s: float, target: int, say: Say) -> None:
        self._site, self._seconds, self._per_s, self._say = site, seconds, per_s, say
        self._target = target
        self.course = Course()
        self._client = site.up.client()
        self._sampling = threading.Event()

    def run(self) -> Course:
        """Runs everything; returns what happened.

        Raises:
            AssertionError: a service was not ready in time.
        """
        site, client = self._site, self._client
        client.set_tenant("t", 3, {"a100": 20}, None)
        for name, placer in ((SPOT, "spothedge"), (ON_DEMAND, None)):
            client.create_service(document(name, self._target, placer))
        key = (site.up.data / "operator.key").read_text().strip()
        balancer = Balancer(site.folder, site.up.client().url, key, (SPOT, ON_DEMAND))
        balancer.start()
        try:
            wait_until(lambda: self._spot_is_settled(), "both services are ready")
            wait_until(lambda: self._answers(balancer.ports[SPOT]), "the balancer answers")
            self._say("both services are ready; the load begins")
            self._under_load(balancer)
        finally:
            balancer.close()
        return self.course

    def _spot_is_settled(self) -> bool:
        spot, other = (self._client.service(name) for name in (SPOT, ON_DEMAND))
        on_spot = sum(count for place, count in spot["ready"].items() if place.startswith("spot"))
        wanted = self._target + 1
        return on_spot == wanted and spot["live"] == wanted and other["state"] == "ready"

    @staticmethod
    def _answers(port: int) -> bool:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200

    def _under_load(self, balancer: Balancer) -> None:
        file, course = self._site.folder / "requests.jsonl", self.course
        url = f"http://127.0.0.1:{balancer.ports[SPOT]}"
        command = [
            sys.executable,
            "-m",
            "rigs.demos.serving.load",
            url,
            str(self._per_s),
            str(self._seconds),
            str(file),
        ]
        sampler = threading.Thread(target=self._sample, daemon=True)
        sampler.start()
        course.began_s = time.time()
        with subprocess.Popen(command, cwd=ROOT) as load:
            try:
                for share, disturb in self._disturbances(balancer):
                    due_s = course.began_s + share * self._seconds
                    time.sleep(max(0.0, due_s - time.time()))
                    disturb()
                assert load.wait(self._seconds + 120) == 0
            finally:
                load.kill()
        course.ended_s = course.began_s + self._seconds
        self._sampling.set()
        sampler.join(30)
        course.preemptions = self._client.service(SPOT)["preemptions"]
        course.outcome = read_outcome(file, course.killed_s)

    def _disturbances(self, balancer: Balancer) -> list[tuple[float, Callable[[], None]]]:
        return [
            (0.12, self._take_a_zone),
            (0.30, self._kill_a_replica),
            (0.42, lambda: self._kill("worker", " worker ")),
            (0.58, lambda: self._kill("Temporal", "temporal server")),
            (0.74, lambda: self._kill_balancer("HAProxy", lambda: os.kill(balancer.haproxy(), signal.SIGKILL))),
            (0.86, lambda: self._kill_balancer("the whole balancer", balancer.kill)),
        ]

    def _take_a_zone(self) -> None:
        """Takes the zone with the most replicas."""
        zones = {one: count for one, count in self._client.service(SPOT)["ready"].items() if one.startswith("spot")}
        zone = max(zones, key=lambda one: zones[one]).rpartition("/")[2]
        number = self._site.take_zone(zone)
        self._note(f"zone {zone} is taken: {number} machine{'s' if number > 1 else ''}, without notice")

    def _kill_a_replica(self) -> None:
        """Kills the server of a replica, which says its process id in its answers."""
        for one in self._client.endpoints(SPOT)["endpoints"]:
            url = f"http://{one['address']}:{one['port']}/generate"
            pid = int(httpx.get(url, params={"tokens": 0}, trust_env=False).headers["x-replica"])
            os.kill(pid, signal.SIGKILL)
            self._note(f"replica {one['replica']} is killed")
            return

    def _kill(self, name: str, words: str) -> None:
        self._site.up.kill(words)
        self._note(f"{name} is killed")

    def _kill_balancer(self, name: str, kill: Callable[[], None]) -> None:
        self.course.killed_s.append(time.time())
        kill()
        self._note(f"{name} is killed")

    def _note(self, text: str) -> None:
        self.course.events.append((time.time(), text))
        self._say(text)

    def _sample(self) -> None:
        while not self._sampling.wait(_SAMPLE_S):
            for name in (SPOT, ON_DEMAND):
                try:
                    one = self._client.service(name)
                except Exception as error:
                    self._say(f"no sample: {error}")
                    continue
                sample = Sample(time.time(), dict(one["ready"]), one["target"], one["usd"])
                self.course.samples[name].append(sample)
