"""shaping: P3's guarantees on real sockets, in network namespaces that a bridge with a rate limit connects.

Seven providers, a machine with research traffic and a store are nodes on one bridge. The bridge's port to the store is
the bottleneck: an HTB class of B bytes/s. Each provider shapes its own migration on its own interface, as the agent
does; nothing on the bridge distinguishes flows.

*Isolation*: the research machine sends B_res for some seconds: alone, while seven migrations send as fast as they can
at rates whose sum is the migration share, and while they do so without rates. Throughput is what the store has
acknowledged.

*Theorem 3*: a case draws one to seven migrations with notices, restart times and rates whose sum is 60 to 100 % of the
migration share (100 % in every second case), and the sizes for which these rates are exactly the least that meet the
deadlines, C / (tau - T_r - `_CONTROL_S`). All notices come at the same time, with the research traffic beside the
migrations. `_CONTROL_S` is what an admission allows for the time from the notice to the first byte; a migration starts
as soon as its own rate is in force. The margin is what remains of the notice when the
store has acknowledged the last byte and the restart time has passed, relative to the notice.

*Theorem 4*: in the same cases, the bytes of IP with the class of migrations that left the bottleneck, in the busiest
window of `_WINDOW_S`, relative to the migration share. Classes may send bursts (`BURST_S`), so the bar is above 1.
"""

import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from agent.network.shaping import BURST_S
from bench.harness import Bench, Figure, Line, Suite, medians
from bench.network_lab import LabNode, ip, lab, nodes, together
from domain.traffic import OVERHEAD_SHARE

_LINK_BYTES_S = 12_500_000
_RESERVED = 0.3
"""P3's share of the bandwidth for research traffic."""
_MIGRATION_BYTES_S = _LINK_BYTES_S * (1 - _RESERVED)
_PAYLOAD_BYTES_S = _MIGRATION_BYTES_S / (1 + OVERHEAD_SHARE)
_RESEARCH_BYTES_S = _LINK_BYTES_S * _RESERVED / (1 + OVERHEAD_SHARE)
"""Payload of research traffic that uses B_res on the wire."""
_PROVIDERS, _CASES = 7, 50
_QUEUE_PACKETS = 100
"""Queue of the bottleneck: 12 ms, as a port of a small switch has."""
_RESEARCH_S = 4.0
_CONTROL_S = 0.3
_WINDOW_S = 0.5
_IDLE_BYTES_S = 1000.0
_MODULE = "bench.shaping_node"
_NICENESS = -10
"""Of all nodes: a sender that waits for a CPU would measure the other load of this computer."""
LINES = (
    Line("throughput of research beside seven shaped migrations, over alone", 0.97, at_least=True),
    Line("throughput of research beside seven unshaped migrations, over alone", None),
    Line("admitted migrations that completed before their deadlines, of all, 50 cases", 1.0, at_least=True),
    Line("smallest margin before a deadline, over the notice, 50 cases", 0.0, at_least=True),
    Line("migration traffic in the busiest half second, over the migration share, 50 cases", 1 + BURST_S / _WINDOW_S),
)


@dataclass(frozen=True)
class _Landing:
    """A migration that has arrived."""

    margin: float
    """What remained of the notice after the restart time, relative to the notice."""
    begin_s: float
    """Time from the notice to the first byte."""


class _Network:
    def __init__(self, providers: list[LabNode], research: LabNode, store: LabNode) -> None:
        self.providers = providers
        self.research = research
        self.store = store

    def send_research(self) -> float:
        """Returns the throughput of the research traffic in bytes/s."""
        result = self.research(
            "send", address=self.store.address, duration_s=_RESEARCH_S, rate_bytes_s=_RESEARCH_BYTES_S, mark=1
        )
        return float(result["bytes"] / (result["end_s"] - result["begin_s"]))

    def shape(self, provider: LabNode, payload_bytes_s: float) -> None:
        """Gives a provider's migration a rate of payload; its class gets the headers in addition."""
        rate_bytes_s = payload_bytes_s * (1 + OVERHEAD_SHARE)
        provider("shape", link_bytes_s=_LINK_BYTES_S, migration_bytes_s=_MIGRATION_BYTES_S, rate_bytes_s=rate_bytes_s)

    def beside_migrations(self) -> float:
        """Returns the throughput of research while all providers send as fast as they can."""
        store, seconds = self.store.address, _RESEARCH_S + 1.0
        flows = [partial(p, "send", address=store, duration_s=seconds) for p in self.providers]

        def research() -> float:
            time.sleep(0.5)
            return self.send_research()

        return float(together([*flows, research])[-1])


@contextmanager
def _network() -> Iterator[_Network]:
    with lab():
        ip("link", "add", "lan", "type", "bridge")
        ip("link", "set", "lan", "up")
        with nodes(_PROVIDERS + 2, _MODULE, _NICENESS) as made:
            for node in made:
                ip("link", "set", node.port, "master", "lan")
            *providers, research, store = made
            _limit(store.port)
            store("receive")
            yield _Network(providers, research, store)


def _limit(port: str) -> None:
    """Limits the rate of a port of the bridge."""
    rate = f"{_LINK_BYTES_S * 8}bit"
    shape = ["htb", "rate", rate, "ceil", rate, "burst", "16k", "cburst", "16k", "quantum", "1514"]
    for words in (
        ["qdisc", "add", "dev", port, "root", "handle", "1:", "htb", "default", "1"],
        ["class", "add", "dev", port, "parent", "1:", "classid", "1:1", *shape],
        ["qdisc", "add", "dev", port, "parent", "1:1", "pfifo", "limit", str(_QUEUE_PACKETS)],
    ):
        subprocess.run(["tc", *words], check=True)


def run(bench: Bench) -> Iterable[Figure]:
    """Yields the figures."""
    with _network() as network:
        sizes = {"link_bytes_s": _LINK_BYTES_S, "migration_bytes_s": _MIGRATION_BYTES_S, "providers": _PROVIDERS}
        found: dict[str, list[float]] = {"alone": [], "shaped": [], "unshaped": []}
        for number in range(bench.rounds):
            bench.say(f"research traffic: round {number + 1} of {bench.rounds}")
            found["alone"].append(network.send_research())
            for provider in network.providers:
                network.shape(provider, _PAYLOAD_BYTES_S / _PROVIDERS)
            found["shaped"].append(network.beside_migrations())
            for provider in network.providers:
                provider("unshape")
            found["unshaped"].append(network.beside_migrations())
        middle = medians(found)
        absolute = {f"{name}_bytes_s": value for name, value in middle.items()}
        yield Figure("shaping", LINES[0], middle["shaped"] / middle["alone"], absolute, bench.rounds, sizes)
        yield Figure("shaping", LINES[1], middle["unshaped"] / middle["alone"], absolute, bench.rounds, sizes)
        yield from _theorems(network, bench.say, sizes)


def _theorems(network: _Network, say: Callable[[str], None], sizes: Mapping[str, float | str]) -> Iterator[Figure]:
    draw = random.Random(16)
    landings: list[_Landing] = []
    busiest: list[float] = []
    for number in range(_CASES):
        say(f"deadlines: case {number + 1} of {_CASES}")
        count = draw.randint(1, _PROVIDERS)
        load = 1.0 if number % 2 else draw.uniform(0.6, 1.0)
        weights = [draw.uniform(0.2, 1.0) for _ in range(count)]
        rates = [load * _PAYLOAD_BYTES_S * weight / sum(weights) for weight in weights]
        notices_s = [draw.uniform(2.0, 5.0) for _ in rates]
        restarts_s = [draw.uniform(0.2, 0.8) for _ in rates]
        providers = draw.sample(network.providers, count)
        with _watched(network.store) as window:
            landings += _case(network, providers, rates, notices_s, restarts_s)
        busiest.append(max(window) / _MIGRATION_BYTES_S)
    margins = [landing.margin for landing in landings]
    met = sum(margin >= 0 for margin in margins) / len(margins)
    absolute = {
        "median_margin": median(margins),
        "migrations": len(margins),
        "median_begin_s": median(landing.begin_s for landing in landings),
        "latest_begin_s": max(landing.begin_s for landing in landings),
    }
    yield Figure("shaping", LINES[2], met, absolute, _CASES, sizes)
    yield Figure("shaping", LINES[3], min(margins), absolute, _CASES, sizes)
    absolute = {"median_share": median(busiest), "least_share": min(busiest)}
    yield Figure("shaping", LINES[4], max(busiest), absolute, _CASES, sizes)


def _case(
    network: _Network, providers: list[LabNode], rates: list[float], notices_s: list[float], restarts_s: list[float]
) -> list[_Landing]:
    """Runs one case."""
    for idle in network.providers:
        network.shape(idle, _IDLE_BYTES_S)  # Sends nothing; also ends the rate of the case before.
    noticed_s = time.monotonic()

    def migrate(provider: LabNode, rate_bytes_s: float, notice_s: float, restart_s: float) -> _Landing:
        size = int(rate_bytes_s * (notice_s - restart_s - _CONTROL_S))
        network.shape(provider, rate_bytes_s)
        result = provider("send", address=network.store.address, size_bytes=size)
        margin = (noticed_s + notice_s - restart_s - result["end_s"]) / notice_s
        return _Landing(float(margin), float(result["begin_s"] - noticed_s))

    calls = [partial(migrate, *case) for case in zip(providers, rates, notices_s, restarts_s, strict=True)]
    return together([*calls, network.send_research])[:-1]


@contextmanager
def _watched(store: LabNode) -> Iterator[list[float]]:
    """Measures the bytes/s of migrations in windows of `_WINDOW_S`, while the block runs."""
    windows: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        last_s, last_bytes = store("received")
        while not stop.wait(_WINDOW_S):
            now_s, now_bytes = store("received")
            windows.append((now_bytes - last_bytes) / (now_s - last_s))
            last_s, last_bytes = now_s, now_bytes

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield windows
    finally:
        stop.set()
        watcher.join()


SUITE = Suite("shaping", LINES, run)
