"""`spothedge+` on random fleets in real processes, at a multiple of the time, compared with the replay of the fleet.

`python -m rigs.spot_fleets [FLEETS [MINUTES [FIRST_SEED]]]` runs a day of each fleet in so many minutes. The replay has
the answers and the cold starts that the live service got: those of the live launch with the same answer that was
nearest in time; of launches at the same time, each has those of another one. The emulated cloud is as fast in each
zone. The replay decides at each change. A miss of a bar ends the run with exit code 1:

- the availability differs from that of the replay by at most 0.5 points, and the cost by at most 5 %;
- the service launches at most twice as many replicas as SpotHedge with one spare in the replay;
- while fewer spot replicas than the target are ready, no granted spot replica is ended within ten minutes.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import yaml
from sqlalchemy import select

from infra.db.capacity import InstanceRow
from infra.db.session import open_engine, transaction
from infra.stack.postgres import EmbeddedPostgres
from research.spot.replay import ReplaySettings, WindowResult, replay_spans
from research.spot.traces import SpotTrace
from services.spot.policies import PolicySettings, make_policy
from services.spot.spothedge_plus import KEPT_S
from services.spot.values import Zone
from tests.stack.harness import Up, wait_until

TARGET, PRICE_RATIO = 3, 3.0
_GAP_S, _DAY_S = 300.0, 86400.0
_SHORT_S = 60.0
"""The ticks of the replay: the service may have begun at any time within a tick of the trace."""
_POINTS, _COST, _LAUNCHES = 0.5, 0.05, 2.0
_FLEET = """
version: 1
regions:
  - {name: west, clusters: []}
"""


def random_fleet(seed: int) -> SpotTrace:
    """Returns a day of three to five zones, which fall and recover independently."""
    rng = random.Random(seed)
    ticks = round(_DAY_S / _GAP_S)
    counts: list[tuple[int, ...]] = []
    for _ in range(rng.randint(3, 5)):
        up_h, down_h, own = rng.uniform(2, 16), rng.uniform(0.3, 3), list[int]()
        while len(own) < ticks:
            own += [rng.randint(1, 4)] * round(1 + rng.expovariate(1 / up_h) * 3600 / _GAP_S)
            own += [rng.choice((0, 0, 1))] * round(1 + rng.expovariate(1 / down_h) * 3600 / _GAP_S)
        counts.append(tuple(own[:ticks]))
    zones = tuple(Zone(f"west/z{at}", "west") for at in range(len(counts)))
    return SpotTrace(zones, _GAP_S, tuple(counts))


def _settings(trace: SpotTrace, speed: float) -> str:
    spot = {
        zone.name.removeprefix("west/"): {"region": "west", "counts": list(counts), "gap_s": trace.gap_s}
        for zone, counts in zip(trace.zones, trace.capacity, strict=True)
    }
    machine = {"gpus": 1, "gpu_type": "a100", "cpus": 1, "memory": "512MiB", "usd_per_h": 1}
    cloud = {
        "kind": "trace", "zones": {**spot, "od": {
            "region": "west", "kind": "on_demand", "most": 8, "price_factor": PRICE_RATIO,
        }},
        "machine_types": {"small": machine}, "start_median_s": 10, "notice_s": 0, "speed": speed,
    }  # fmt: skip
    capacity = {"interval_s": 0.5, "refused_pause_s": 120 / speed, "drain_s": 0, "lost_after_s": 20}
    services = {"policy_speed": speed, "interval_s": 1, "readiness_interval_s": 0.2}
    return yaml.safe_dump({"capacity": capacity, "services": services, "providers": {"sim": cloud}})


def _document() -> dict[str, Any]:
    policy = {"min_replicas": TARGET, "spot_placer": "spothedge+", "dynamic_ondemand_fallback": True}
    return {
        "version": 1, "name": "chat", "tenant": "t",
        "service": {
            "readiness_probe": {"path": "/", "initial_delay_seconds": 60}, "replica_policy": policy, "drain_seconds": 0,
        },
        "resources": {"accelerators": "a100:1", "cpus": 0.5, "memory": "128MiB", "ports": 8000, "use_spot": True},
        "run": 'exec "$MIZZEN_PYTHON" -m http.server "$MIZZEN_PORT"',
    }  # fmt: skip


@dataclass(frozen=True)
class SpotReplicaCourse:
    """A replica of the live service. Times are seconds of the trace since the service was created."""

    is_spot: bool
    zone: str | None
    """The zone of the trace; None: on-demand."""
    asked_s: float
    granted_s: float | None
    ready_s: float | None
    ended_s: float
    cause: str | None


@dataclass
class RecordedAnswers:
    """The times that a live service had to wait, as a function of the time at which the wait begins."""

    waits: dict[str, list[tuple[float, float]]]
    """When each wait began, and its length: until a grant, a refusal or the end of a cold start."""
    gap_s: float
    """The length of a tick of the replay in seconds."""
    begun: Counter[tuple[str, int]] = field(default_factory=Counter)
    """The number of waits of the replay so far, by what is waited for and by tick."""

    @classmethod
    def of(cls, replicas: Iterable[SpotReplicaCourse], gap_s: float) -> Self:
        """Returns the answers to all launches that were answered."""
        waits: dict[str, list[tuple[float, float]]] = {}
        for one in replicas:
            if one.granted_s is not None:
                waits.setdefault(f"grant {one.is_spot}", []).append((one.asked_s, one.granted_s - one.asked_s))
                if one.ready_s is not None:
                    waits.setdefault(f"start {one.is_spot}", []).append((one.granted_s, one.ready_s - one.granted_s))
            elif one.cause == "refused":
                waits.setdefault("refusal", []).append((one.asked_s, one.ended_s - one.asked_s))
        return cls(waits, gap_s)

    def next(self, zone: str | None, tick: int, *, has_room: bool) -> tuple[bool, float]:
        """See `research.spot.answers.Answers.next`."""
        return has_room, self._wait(f"grant {zone is not None}" if has_room else "refusal", tick) or 0.0

    def cold_start_s(self, zone: str | None, tick: int) -> float | None:
        """See `research.spot.answers.Answers.cold_start_s`."""
        return self._wait(f"start {zone is not None}", tick)

    def _wait(self, what: str, tick: int) -> float | None:
        """Returns the length of the nearest wait, and of the next nearest one if this was taken in the same tick."""
        if what not in self.waits:
            return None
        far = sorted((abs(at_s - tick * self.gap_s), wait_s) for at_s, wait_s in self.waits[what])
        near = [wait_s for distance_s, wait_s in far if distance_s <= far[0][0] + _GAP_S]
        self.begun[what, tick] += 1
        return near[(self.begun[what, tick] - 1) % len(near)]


@dataclass(frozen=True)
class LiveDay:
    """The results of one day of the live service."""

    availability: float
    cost: float
    began_s: float
    """When the service was created, in seconds of the trace."""
    replicas: tuple[SpotReplicaCourse, ...]

    @property
    def cold_start_s(self) -> float:
        """The mean time from a grant until the replica was ready, in seconds of the trace."""
        return fmean(one.ready_s - (one.granted_s or one.asked_s) for one in self.replicas if one.ready_s is not None)

    def thrown_away(self) -> list[SpotReplicaCourse]:
        """Returns the granted spot replicas that were ended within `KEPT_S` while too few spot replicas were ready."""

        def ready(at_s: float) -> int:
            own = (one for one in self.replicas if one.is_spot and one.ready_s is not None)
            return sum(one.ready_s <= at_s < one.ended_s for one in own if one.ready_s is not None)

        return [
            one
            for one in self.replicas
            if one.is_spot and one.granted_s is not None and one.cause == "scaled_down"
            and one.ended_s - one.granted_s < KEPT_S and ready(one.ended_s) < TARGET
        ]  # fmt: skip


def run_live(trace: SpotTrace, folder: Path, minutes: float) -> LiveDay:
    """Runs the service for a day of the trace, compressed to the given minutes.

    Raises:
        AssertionError: the installation, or the first replica, did not start in time.
    """
    speed = _DAY_S / (60 * minutes)
    up = Up(folder, _FLEET, lost_s=5, settings=_settings(trace, speed))
    try:
        up.start(machines=False)
        client = up.client()
        client.set_tenant("t", 3, {"a100": 20}, None)
        client.create_service(_document())
        began_s = _seconds(client.service("chat")["created_at"])
        wait_until(lambda: client.service("chat")["ready"], "a replica is ready")
        time.sleep(max(0.0, began_s + 60 * minutes - time.time()))
        service, now_s = client.service("chat"), time.time()
        replicas, granted = list(client.service_replicas("chat")), _granted(up)
        first_s = float((up.data / "providers" / "sim" / "began").read_text())
    finally:
        up.close()
    assert service["availability"] is not None and service["usd_on_demand"]

    def at(text: str | datetime | None) -> float | None:
        return None if text is None else (_seconds(text) - began_s) * speed

    courses = [
        SpotReplicaCourse(
            one["kind"] == "spot",
            one["zone"] if one["kind"] == "spot" else None,
            at(one["launched_at"]) or 0.0,
            at(granted.get(one["workload"])),
            at(one["ready_at"]),
            (now_s - began_s) * speed if one["ended_at"] is None else at(one["ended_at"]) or 0.0,
            one["cause"],
        )
        for one in replicas
    ]
    cost = service["usd"] / service["usd_on_demand"]
    return LiveDay(service["availability"], cost, (began_s - first_s) * speed, with_own_grants(courses))


def with_own_grants(courses: Iterable[SpotReplicaCourse]) -> tuple[SpotReplicaCourse, ...]:
    """Returns the replicas with the grants of their own launches.

    Replicas of a zone exchange their machines, also with replicas that have ended: a machine may have been granted
    before its replica was launched. In each zone, the first grant belongs to the first launch that was granted.
    """
    found = list(courses)
    for zone in {one.zone for one in found}:
        own = [at for at, one in enumerate(found) if one.zone == zone and one.granted_s is not None]
        times_s = sorted(one.granted_s for one in found if one.zone == zone and one.granted_s is not None)
        for at, granted_s in zip(sorted(own, key=lambda at: found[at].asked_s), times_s, strict=True):
            found[at] = replace(found[at], granted_s=granted_s)
    return tuple(found)


def _granted(up: Up) -> dict[str, datetime]:
    """Returns when the machine of each replica's workload was granted."""
    launched = select(InstanceRow.workload, InstanceRow.launched_at)
    engine = open_engine(EmbeddedPostgres(up.data / "postgres").url)
    with transaction(engine) as session:
        rows = session.execute(launched).all()
    engine.dispose()
    return {workload: at for workload, at in rows if workload is not None and at is not None}


def _seconds(time_: str | datetime) -> float:
    return (datetime.fromisoformat(time_) if isinstance(time_, str) else time_).timestamp()


def _moved(trace: SpotTrace, first_s: float) -> SpotTrace:
    """Returns the trace in short ticks from a time on, with what is before at the end."""
    parts = round(trace.gap_s / _SHORT_S)
    first = round(first_s / _SHORT_S) % (trace.ticks * parts)
    rows = (tuple(count for count in own for _ in range(parts)) for own in trace.capacity)
    return replace(trace, gap_s=_SHORT_S, capacity=tuple(own[first:] + own[:first] for own in rows))


@dataclass(frozen=True)
class FleetResult:
    """A live day of a fleet, and the replays with the same answers."""

    seed: int
    day: LiveDay
    own: WindowResult
    """The replay of `spothedge+`."""
    hedge: WindowResult
    """The replay of SpotHedge with one spare."""

    @classmethod
    def of(
        cls, seed: int, day: LiveDay, trace: SpotTrace, rules: ReplaySettings, answers: RecordedAnswers | None = None
    ) -> Self:
        """Returns the result with a replay of each policy, which decides at each change.

        Args:
            seed: the number of the fleet.
            day: the live day.
            trace: the capacity.
            rules: the settings of the replays.
            answers: the answers to launches; None: those of `rules`.
        """

        def replayed(name: str) -> WindowResult:
            made = make_policy(name, PolicySettings(trace.zones))
            own = None if answers is None else replace(answers, begun=Counter())
            return replay_spans(trace, made, rules, 0, trace.ticks, answers=own)[0]

        return cls(seed, day, replayed("spothedge+"), replayed("spothedge"))

    @property
    def points(self) -> float:
        """The difference in availability from the replay, in points of a percent."""
        return 100 * (self.day.availability - self.own.availability)

    @property
    def cost(self) -> float:
        """The difference in cost from the replay, as a share of the replay's."""
        return self.day.cost / self.own.cost - 1

    @property
    def launches(self) -> float:
        """The launches of a live day, refused ones included, for each launch of SpotHedge."""
        return len(self.day.replicas) / (self.hedge.launches + self.hedge.refusals)

    @property
    def away(self) -> int:
        """The number of granted spot machines that were thrown away."""
        return len(self.day.thrown_away())

    def missed(self) -> list[str]:
        """Returns the bars that the fleet misses."""
        bars = {
            "availability": abs(self.points) <= _POINTS,
            "cost": abs(self.cost) <= _COST,
            "launches": self.launches <= _LAUNCHES,
            "machines thrown away": not self.away,
        }
        return [name for name, holds in bars.items() if not holds]

    def __str__(self) -> str:
        courses = self.day.replicas
        granted = Counter("spot" if one.is_spot else "on-demand" for one in courses if one.granted_s is not None)
        return (
            f"fleet {self.seed}: availability {100 * self.day.availability:.2f} %"
            f" ({self.points:+.2f} points), cost {100 * self.day.cost:.1f} %"
            f" ({100 * self.cost:+.1f} %), launches {len(courses)} ({self.launches:.2f} of SpotHedge's),"
            f" granted {granted['spot']} spot and {granted['on-demand']} on-demand,"
            f" thrown away {self.away}"
        )


def judge(seed: int, trace: SpotTrace, day: LiveDay) -> list[str]:
    """Prints the figures of a fleet, and returns the bars that it misses."""
    moved, answers = _moved(trace, day.began_s), RecordedAnswers.of(day.replicas, _SHORT_S)
    result = FleetResult.of(seed, day, moved, ReplaySettings(TARGET, day.cold_start_s, PRICE_RATIO), answers)
    granted = [*answers.waits.get("grant True", []), *answers.waits.get("grant False", [])]
    granted_s = fmean([wait_s for _, wait_s in granted] or [0.0])
    refused_s = fmean([wait_s for _, wait_s in answers.waits.get("refusal", [])] or [0.0])
    print(
        f"{result}; cold start {day.cold_start_s:.0f} s, grants after {granted_s:.0f} s, refusals after"
        f" {refused_s:.0f} s",
        flush=True,
    )
    return [f"fleet {seed}: {name}" for name in result.missed()]


def main() -> None:
    """Runs the fleets one after the other."""
    fleets, minutes, first = [*map(float, sys.argv[1:4]), *(5.0, 20.0, 0.0)[len(sys.argv[1:4]) :]]
    missed = []
    for seed in range(int(first), int(first + fleets)):
        trace = random_fleet(seed)
        with tempfile.TemporaryDirectory() as folder:
            missed += judge(seed, trace, run_live(trace, Path(folder), minutes))
    if missed:
        raise SystemExit("bars missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
