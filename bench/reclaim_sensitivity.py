"""How much the free parameters of P2 and P3 matter: the tables of docs/reclaim-traffic.md.

    python -m bench.reclaim_sensitivity

The campus is that of the paper's section IV: 54 nodes in four buildings, 820 Mbit/s within and 240 Mbit/s between
buildings, each link off its mean by up to 60 %, checkpoints from 120 MB to 48 GB with a median of 3.2 GB. Everything is
drawn from fixed seeds, so every setting sees the same campuses, jobs and notices.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import click
import numpy as np

from bench.reclaim import CORE_BYTES_S, LOCAL_BYTES_S
from reclaim.admission import FlowOutcome, Flows, SpareSharing, decide
from reclaim.arrays import Floats
from reclaim.buildings import Rules
from reclaim.traffic import migration_share, wire_bytes
from research.reclaim.algorithm_2 import Nodes, choose
from research.reclaim.destinations import Leaving, Network
from research.reclaim.topology import NOWHERE, Links, Topology

NODES, BUILDINGS = 54, 4
JOBS, JOB_H = 1_500, 8.0
CASES, MIGRATIONS = 150, 7
RESTART_S = 30.0


def sizes(rng: np.random.Generator, count: int) -> Floats:
    """Returns sizes of checkpoints in bytes."""
    return np.clip(np.exp(rng.normal(np.log(3.2e9), 1.5, count)), 120e6, 48e9)


def varied(rng: np.random.Generator, mean: float, count: int) -> Floats:
    """Returns bandwidths that are off their mean by up to 60 %."""
    return mean * rng.uniform(0.4, 1.6, count)


def network(rng: np.random.Generator) -> Network:
    """Returns a campus with newly drawn bandwidths."""
    topology = Topology.of(
        np.arange(NODES) % BUILDINGS,
        [0] * BUILDINGS,
        access=Links.of(varied(rng, LOCAL_BYTES_S, NODES), varied(rng, LOCAL_BYTES_S, NODES)),
        distribution=Links.of(varied(rng, CORE_BYTES_S, BUILDINGS), varied(rng, CORE_BYTES_S, BUILDINGS)),
        core=Links.of([1.25e9], 1.25e9),
    )
    return Network.direct(topology)


def downtime(rules: Rules) -> tuple[float, float]:
    """Returns the mean seconds of downtime and the mean number of migrations of a job of 8 hours.

    A job migrates whenever its node departs. Hazards differ between nodes, and P2 knows them only with an error. A job
    without a candidate waits ten minutes and tries again.
    """
    waited_s = migrations = 0.0
    for seed in range(JOBS):
        rng = np.random.default_rng(seed)
        hazard_per_h = np.exp(rng.normal(np.log(0.3), 0.8, NODES))
        estimate_per_h = hazard_per_h * np.exp(rng.normal(0, 0.5, NODES))
        at, left_h, size = int(rng.integers(NODES)), JOB_H, float(sizes(rng, 1)[0])
        while True:
            stay_h = rng.exponential(1 / hazard_per_h[at])
            if stay_h >= left_h:
                break
            left_h -= stay_h
            nodes = Nodes.of(NODES, memory_bytes=24e9, capability=8.6, load=rng.random(NODES))
            leaving = Leaving.of([at], checkpoint_bytes=size, memory_bytes=20e9, restart_s=RESTART_S)
            found = choose(network(rng), nodes, leaving, np.exp(-estimate_per_h * left_h), rules)
            migrations += 1
            if found.destination[0] == NOWHERE:
                waited_s += 600.0
                at = int(rng.integers(NODES))
                continue
            waited_s += found.migration_s[0]
            at = int(found.destination[0])
    return waited_s / JOBS, migrations / JOBS


def assumed_restart(assumed_s: float) -> tuple[float, float, float]:
    """Returns the shares of migrations that complete in time, are admitted but late, and are refused in error.

    Direct migrations within a building; T_r varies about a median of 30 s.
    """
    rng = np.random.default_rng(1)
    count = 100_000
    transfer_s = sizes(rng, count) / varied(rng, LOCAL_BYTES_S, count)
    restart_s = np.exp(rng.normal(np.log(RESTART_S), 0.4, count))
    notice_s = np.exp(rng.uniform(np.log(10), np.log(1800), count))
    admitted, fits = transfer_s + assumed_s <= notice_s, transfer_s + restart_s <= notice_s
    return float((admitted & fits).mean()), float((admitted & ~fits).mean()), float((~admitted & fits).mean())


def control_period(period_s: float, headroom_share: float, spread: SpareSharing) -> tuple[float, float, float]:
    """Returns the shares of seven simultaneous uploads that complete in time, are admitted but late, and are refused.

    They share one link, whose bandwidth moves between 40 % and 160 % of its mean within about ten minutes. A decision
    is made in every period from the bandwidth of that second. Until the next one, a link that cannot carry what was
    assigned slows all flows in proportion. A flow that is refused is offered again until its notice is over.
    """
    counts = np.zeros(3)
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        phase, clock = rng.uniform(0, 2 * np.pi, 3), np.arange(1800)
        swing = sum(np.sin(2 * np.pi * clock / length + p) for length, p in zip((600, 240, 70), phase, strict=True)) / 3
        share = migration_share(LOCAL_BYTES_S * (1 + 0.6 * swing + rng.uniform(-0.1, 0.1, len(clock))))
        deadline_s = np.exp(rng.uniform(np.log(60), np.log(1700), MIGRATIONS))
        flows = Flows.of(wire_bytes(sizes(rng, MIGRATIONS)), deadline_s, np.zeros((MIGRATIONS, 1), int), rest_s=2.0)
        for now_s in clock.tolist():
            if now_s % period_s == 0:
                found = decide(flows, share[now_s : now_s + 1], float(now_s), headroom_share, spread)
                takes_part = found.outcome <= FlowOutcome.SQUEEZED
                flows = replace(flows, start_s=found.start_s, is_admitted=takes_part | flows.is_admitted)
            slowed = min(1.0, share[now_s] / max(found.rate_bytes_s.sum(), 1))
            in_time = flows.deadline_s - flows.rest_s >= now_s + 1
            left = flows.remaining_bytes - np.where(in_time, found.rate_bytes_s * slowed, 0.0)
            flows = replace(flows, remaining_bytes=np.maximum(left, 0.0))
        done = flows.remaining_bytes <= 0
        counts += [done.sum(), (~done & flows.is_admitted).sum(), (~done & ~flows.is_admitted).sum()]
    shares = counts / (CASES * MIGRATIONS)
    return float(shares[0]), float(shares[1]), float(shares[2])


def tables() -> Iterator[str]:
    """Yields the rows of all tables."""
    base = Rules()
    settings: list[tuple[str, Rules]] = [("defaults", base)]
    settings += [(f"k_min {k}", replace(base, min_local=k)) for k in (1, 3, 5, 10)]
    settings += [(f"alpha {alpha:g}", replace(base, alpha=alpha)) for alpha in (0.0, 0.5, 2.0)]
    settings += [(f"theta {theta:g}", replace(base, max_load=theta)) for theta in (0.2, 0.5, 0.95)]
    for name, rules in settings:
        waited_s, migrations = downtime(rules)
        yield f"| {name} | {waited_s:.0f} | {migrations:.2f} |"
    yield from _rows("T_r", (0.0, 15.0, 30.0, 60.0, 120.0), assumed_restart)
    for spread in SpareSharing:
        for headroom in (0.0, 0.1):
            measure = partial(control_period, headroom_share=headroom, spread=spread)
            yield from _rows(f"{spread}, headroom {headroom:g}, period", (1, 10, 60), measure)


def _rows(name: str, values: tuple[float, ...], measure: Callable[[float], tuple[float, ...]]) -> Iterator[str]:
    for value in values:
        yield f"| {name} {value:g} s | " + " | ".join(f"{share:.1%}" for share in measure(value)) + " |"


@click.command()
def main() -> None:
    """Prints the tables."""
    for row in tables():
        click.echo(row)


if __name__ == "__main__":
    main()
